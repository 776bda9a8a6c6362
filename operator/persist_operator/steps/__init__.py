"""One reconcile in small idempotent steps: observe, (plan,) write the status, act. Blocking; called by the handlers' workers."""
