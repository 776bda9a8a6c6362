# Runs inside the node image while it is built: disables systemd units that a container does not need, enables kind's units, installs CNI plugins.
find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete
rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* \
  /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* /lib/systemd/system/basic.target.wants/*
echo ReadKMsg=no >> /etc/systemd/journald.conf
ln -sf /lib/systemd/systemd /sbin/init
ln -sf /usr/bin/containerd /usr/local/bin/containerd
systemctl -q enable kubelet.service containerd.service undo-mount-hacks.service
systemctl -q mask systemd-binfmt.service
mkdir -p /etc/kubernetes/manifests /opt/cni/bin /etc/cni/net.d
cp -a /usr/lib/cni/* /opt/cni/bin/
ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer | length] |= . + {"path": "/kind/bin/mount-product-files.sh"}' |
  jq 'del(.process.rlimits)' > /etc/containerd/cri-base.json
