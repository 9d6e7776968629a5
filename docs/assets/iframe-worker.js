// Browsers give no worker to a page that was opened from a disk. The search of
// the site runs in one; there it runs in a hidden frame, so that it needs no
// server. (Zensical would fetch such a script if this file had another name.)
if (location.protocol === "file:") {
  const copyOf = (data) => ({ data: structuredClone(data) });
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.started = new Promise((resolve) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.onmessage?.(copyOf(data));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      const message = copyOf(data);
      (await this.started).onmessage(message);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
