"""Replicas of the operator: processes that stand on the API server of the tests."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time

import yaml

#: The longest that a process may take to end while a store or the API server hangs, and a test may wait for an event. Each lies far above
#: the time that it takes.
ENDS_S = 25
HAPPENS_S = 100


def eventually(holds, timeout_s=HAPPENS_S, *, pause_s=0.05):
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
    return True


class Replica:
    """One process of the operator. `settings` go over those of the test: files for blobs, its probes on a free port, frequent looks."""

    def __init__(self, folder, kubeconfig, name, consensus, *, take_over="SameNamespace", **settings):
        stores = {"blob": f"file://{folder}/blob", "consensus": consensus, "takeOver": take_over}
        settings = {
            "storageProfiles": {"default": {**stores, "allowedNamespaces": {"names": ["team"]}}},
            "httpPort": 0,
            "leader": {"namespace": "operator"},
            "loop": {"inspectSeconds": 1},
            **settings,
        }
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        variables = {"KUBECONFIG": str(kubeconfig), "PERSIST_OPERATOR_CONFIG": str(config), "POD_NAME": name}
        self.log, self._port = folder / f"{name}.log", 0
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "persist_operator.main"], env={**os.environ, **variables}, stderr=log
            )

    @property
    def port(self):
        """The port of its probes; 0 until it logs that it serves them."""
        if not self._port:
            lines = [line for line in self.log.read_text().splitlines() if '"serving"' in line]
            self._port = int(json.loads(lines[0])["port"]) if lines else 0
        return self._port

    def probe(self, path):
        """(code, body); code 0 while no process listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HAPPENS_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def is_ready(self):
        return self.probe("/readyz")[0] == 200

    def metrics(self):
        """The samples by series, as its /metrics shows them."""
        lines = [line for line in self.probe("/metrics")[1].splitlines() if not line.startswith("#")]
        return dict(line.rsplit(" ", 1) for line in lines)

    def metric(self, name):
        sample = self.metrics().get(name)
        return None if sample is None else float(sample)

    def leads(self):
        return self.metric("persist_operator_leader") == 1.0

    def end(self, within_s=HAPPENS_S):
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)
