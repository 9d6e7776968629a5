#!/usr/bin/env bash
# Runs make targets on Debian's newest Python with the newest JAX that pip
# installs there, in a separate system root:
#
#   tests/newest.sh [TARGET...]     default: test-core
#   tests/newest.sh --why-not       fails and prints why it cannot run here
#
# The root stays in .newest/ (or in the folder NEWEST_ROOT), so that only the
# first run downloads a system. It uses this machine's mirror, pip settings and
# certificates. All mounts are in a separate namespace and end with the script.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly SUITE=trixie
readonly ROOT=${NEWEST_ROOT:-$PWD/.newest}

why_not() {
  [ "$(uname -s)" = Linux ] || { echo "this is not Linux"; return; }
  [ "$(id -u)" = 0 ] || { echo "only root may make a system root"; return; }
  for tool in debootstrap unshare chroot git; do
    command -v "$tool" > /dev/null || { echo "$tool is not installed"; return; }
  done
  unshare --mount true 2> /dev/null || echo "mounts are not allowed here"
}

# Prints the first Debian archive in apt's configuration.
mirror() {
  { apt-get indextargets --format '$(REPO_URI)' \
      'Created-By: Packages' 'Origin: Debian' 2> /dev/null || true; } |
    grep -v security | head -n 1
}

# Prints the local folders of pip's configuration, to mount them in the root.
# For a file:// index it prints the parent, which holds the indexed files.
pip_folders() {
  python3 -m pip config list 2> /dev/null | tr "'= ," '\n\n\n\n' |
    while read -r word; do
      case $word in
        file:///*) dirname "${word#file://}" ;;
        /*) [ ! -d "$word" ] || echo "$word" ;;
      esac
    done | sort -u
}

build() {
  [ -e "$ROOT/.built" ] && return
  rm -rf "$ROOT"
  debootstrap --variant=minbase \
    --include=ca-certificates,git,iproute2,make,python3,python3-venv \
    "$SUITE" "$ROOT" $(mirror)
  touch "$ROOT/.built"
}

# Copies the settings of this machine that downloads depend on.
copy_settings() {
  local file
  for file in /etc/resolv.conf /etc/hosts /etc/pip.conf \
    /etc/ssl/certs/ca-certificates.crt ~/.config/pip/pip.conf \
    ~/.pip/pip.conf; do
    [ -e "$file" ] || continue
    mkdir -p "$ROOT$(dirname "$file")"
    cp -L "$file" "$ROOT$file"
  done
}

# Replaces the project in the root by the files that git tracks or does not
# ignore. The virtual environment of an earlier run stays.
copy_project() {
  mkdir -p "$ROOT/project"
  find "$ROOT/project" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      if [ -e "$file" ]; then printf '%s\0' "$file"; fi
    done |
    tar --create --null --files-from=- | tar --extract --directory "$ROOT/project"
}

enter() {
  local folder
  mount --make-rprivate /
  mount -t proc proc "$ROOT/proc"
  mount --rbind /dev "$ROOT/dev"
  mount --rbind /sys "$ROOT/sys"
  mount -t tmpfs tmpfs "$ROOT/tmp"
  mkdir -p "$ROOT/dev/shm"
  for folder in $(pip_folders); do
    mkdir -p "$ROOT$folder"
    mount --bind -o ro "$folder" "$ROOT$folder"
  done
  # Without the variables of a virtual environment that this may run in.
  unset VIRTUAL_ENV PYTHONHOME PYTHONPATH XLA_FLAGS NPROC EDGC_JAX_NPROC
  export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  exec chroot "$ROOT" make -C /project PYTHON=python3 "$@"
}

case ${1:-} in
  --why-not)
    reason=$(why_not)
    [ -z "$reason" ] || { echo "$reason"; exit 1; }
    ;;
  --inside)
    shift
    enter "$@"
    ;;
  *)
    reason=$(why_not)
    [ -z "$reason" ] || { echo "$0: $reason" >&2; exit 1; }
    build
    copy_settings
    copy_project
    exec unshare --mount "$PWD/tests/newest.sh" --inside "${@:-test-core}"
    ;;
esac
