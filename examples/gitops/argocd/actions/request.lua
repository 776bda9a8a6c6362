-- Requests one run now. VERB stands for the action: compact, gc, rollup, verify, orphan-scan, restart or promote.
local os = require("os")
if obj.metadata.annotations == nil then
  obj.metadata.annotations = {}
end
obj.metadata.annotations["persistshard.io/request-VERB"] = os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
