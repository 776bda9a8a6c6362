# Runs inside the node image while it is built: imports the component images, as `kind build node-image` does. Unpacking happens at first use.
containerd >/tmp/containerd.log 2>&1 &
pid=$!
tries=0
until ctr version >/dev/null 2>&1; do
  tries=$((tries + 1))
  [ $tries -lt 100 ] || { cat /tmp/containerd.log; exit 1; }
  sleep 0.2
done
for archive in /img/*.tar; do
  ctr -n k8s.io images import --all-platforms --no-unpack --digests "$archive" >/dev/null || { cat /tmp/containerd.log; exit 1; }
done
kill $pid
wait $pid || true
rm -rf /img /tmp/containerd.log /run/containerd
