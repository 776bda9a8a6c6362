# The images: a Debian base, the control plane's components, and the node itself with all of them preloaded. Sourced by build.

APT_INSTALL='DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold'
APT_CLEAN='apt-get clean; rm -rf /var/lib/apt/lists/* /usr/share/doc /usr/share/locale /usr/share/man'

# The first Debian mirror of this machine; the public one if its sources name none.
debian_mirror() {
  local file mirror=
  for file in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -f "$file" ] || continue
    mirror=$(sed -nE 's/^(URIs:|deb)( +\[[^]]*\])? +([^ ]+).*/\3/p' "$file" | grep -m1 debian || true)
    [ -n "$mirror" ] && break
  done
  [ -n "$mirror" ] || die "no Debian mirror found in the apt sources of this machine"; echo "$mirror"
}

# The name is that of the public image, so that the same Dockerfiles build with and without a registry.
build_base_image() {
  podman image exists "$BASE_IMAGE" && return
  local root=$STATE/debian container
  rm -rf "$root"
  debootstrap --variant=minbase bookworm "$root" "$(debian_mirror)" >/dev/null
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  container=$(buildah from scratch)
  buildah add -q "$container" "$root" / >/dev/null
  buildah config --cmd bash "$container"
  buildah commit -q --rm "$container" "$BASE_IMAGE" >/dev/null
  rm -rf "$root"
}

push_archive() { # IMAGE
  buildah push -q "$1" "oci-archive:$STATE/img/$(tr '/:' '__' <<<"$1").tar:$1" >/dev/null
}

single_binary_image() { # IMAGE BINARY: from scratch, one static program
  local container root
  container=$(buildah from scratch)
  root=$(buildah mount "$container")
  mkdir -p "$root"/etc "$root"/usr/local/bin "$root"/tmp
  chmod 1777 "$root/tmp"
  echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
  echo 'root:x:0:0:root:/:/sbin/nologin' > "$root/etc/passwd"
  cp "$2" "$root/usr/local/bin/"
  buildah umount "$container" >/dev/null
  buildah config --env PATH=/usr/local/bin --entrypoint "[\"/usr/local/bin/$(basename "$2")\"]" "$container"
  buildah commit -q --rm "$container" "$1" >/dev/null
  push_archive "$1"
}

build_component_images() {
  local image name pause=registry.k8s.io/pause:3.10       # the sandbox image that kind's containerd configuration names
  rm -rf "$STATE/img"
  mkdir -p "$STATE/img"
  while read -r image; do
    name=${image##*/}
    name=${name%%:*}
    case $name in pause | kube-proxy) ;; *) single_binary_image "$image" "$STATE/bin/$name" ;; esac
  done < <("$STATE/bin/kubeadm" config images list --kubernetes-version "v$KUBERNETES_VERSION")
  gcc -static -Os -s -o "$STATE/bin/pause" "$HERE/pause.c"
  single_binary_image "$pause" "$STATE/bin/pause"
  build_kube_proxy "registry.k8s.io/kube-proxy:v$KUBERNETES_VERSION"
}

build_kube_proxy() { # IMAGE
  local container root
  container=$(buildah from --pull-never "$BASE_IMAGE")
  buildah run "$container" -- sh -ec "apt-get update -qq; $APT_INSTALL iptables nftables conntrack kmod ipset iproute2 >/dev/null 2>&1; $APT_CLEAN"
  root=$(buildah mount "$container")
  cp "$STATE/bin/kube-proxy" "$root/usr/local/bin/kube-proxy.bin"
  install -m 755 "$HERE/kube-proxy" "$root/usr/local/bin/kube-proxy"
  buildah umount "$container" >/dev/null
  buildah commit -q --squash --rm "$container" "$1" >/dev/null
  push_archive "$1"
}

# kind's own base image files, on Debian's systemd, containerd, runc and CNI plugins: the steps of kind's images/base/Dockerfile.
build_node_image() {
  local container root source
  source=$(cd "$STATE/src/k8s" && go mod download -json "sigs.k8s.io/kind@v$KIND_VERSION" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')/images/base/files
  container=$(buildah from --pull-never "$BASE_IMAGE")
  root=$(buildah mount "$container")
  cp -r --no-preserve=mode "$source/kind" "$root/"
  cp -r --no-preserve=mode "$source"/usr/local/bin/* "$root/usr/local/bin/"
  cp -r --no-preserve=mode "$source"/etc/* "$root/etc/"
  chmod 755 "$root"/usr/local/bin/* "$root/kind" "$root/kind/bin" "$root"/kind/bin/*
  buildah run "$container" -- sh -ec "apt-get update -qq
    $APT_INSTALL systemd conntrack iptables nftables iproute2 ethtool util-linux mount kmod libseccomp2 pigz bash ca-certificates curl jq procps \
      containerd runc containernetworking-plugins >/dev/null 2>&1; $APT_CLEAN"
  buildah run "$container" -- sh -ec "$(cat "$HERE/node-setup.sh")"
  # Without CAP_SYS_RESOURCE no process in the node may lower an oom_score_adj.
  sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"
  sed -i 's|^KUBELET_EXTRA_ARGS=.*|& --oom-score-adj=0|' "$root/etc/default/kubelet"
  cp "$STATE"/bin/{kubeadm,kubelet,kubectl} "$root/usr/bin/"
  cp "$STATE/bin/crictl" "$root/usr/local/bin/"
  printf %s "v$KUBERNETES_VERSION" > "$root/kind/version"
  mkdir -p "$root/kind/manifests" "$root/img"
  sed "s/@VERSION@/v$KUBERNETES_VERSION/" "$HERE/default-cni.yaml" > "$root/kind/manifests/default-cni.yaml"
  cp "$HERE/default-storage.yaml" "$root/kind/manifests/"
  cp "$STATE"/img/*.tar "$root/img/"
  buildah run "$container" -- sh -ec "$(cat "$HERE/node-preload.sh")"
  buildah umount "$container" >/dev/null
  buildah config --env container=docker --stop-signal SIGRTMIN+3 --entrypoint '["/usr/local/bin/entrypoint","/sbin/init"]' --cmd '' "$container"
  buildah commit -q --squash --rm "$container" "$NODE_IMAGE" >/dev/null
}
