"""One reconcile in small idempotent steps: observe, plan, write the status, act. Calls block. The workers of `handlers` call them."""
