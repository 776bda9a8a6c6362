# What podman needs on the machine itself: packages, a network with name resolution, a runtime that works without CAP_SYS_RESOURCE.
# Sourced by build. Idempotent; writes only below $STATE (and an empty /lib/modules where there is none).

prepare_host() {
  local package missing=()
  for package in podman buildah runc debootstrap gcc libc6-dev python3 iptables ca-certificates; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  if ((${#missing[@]})); then
    [ "$(id -u)" = 0 ] || die "missing packages: ${missing[*]} (as root: apt-get install ${missing[*]})"
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
  mkdir -p /lib/modules "$STATE"               # kind mounts /lib/modules into the node; podman refuses a missing source
  find_network_backend
  install -m 755 "$HERE/runc-unprivileged" "$STATE/runc-unprivileged"
  mkdir -p "$STATE/shim"                       # `kind load docker-image` calls docker with every provider
  printf '#!/bin/sh\nexec podman "$@"\n' > "$STATE/shim/docker"
  chmod +x "$STATE/shim/docker"
  cat > "$STATE/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=20000:20000"]
oom_score_adj = 0
pids_limit = 0
[network]
network_backend = "netavark"
[engine]
cgroup_manager = "cgroupfs"
runtime = "$STATE/runc-unprivileged"
helper_binaries_dir = ["$STATE/helpers", "/usr/libexec/podman", "/usr/lib/podman"]
CONF
}

# netavark and aardvark-dns let a worker find the control plane by name; without them, Debian's podman runs but cannot resolve names.
# They are unpacked, not installed, so that other containers on the machine keep their network backend.
find_network_backend() {
  if [ -x /usr/lib/podman/netavark ]; then ln -sfn /usr/lib/podman "$STATE/helpers"; return; fi
  [ -x "$STATE/helpers/netavark" ] && return
  local dir=$STATE/debs deb
  rm -rf "$dir"
  mkdir -p "$dir"
  ( cd "$dir"
    apt-get download -qq netavark aardvark-dns 2>/dev/null || { apt-get update -qq; apt-get download -qq netavark aardvark-dns; }
    for deb in *.deb; do dpkg -x "$deb" unpacked; done )
  ln -sfn "$dir/unpacked/usr/lib/podman" "$STATE/helpers"
}
