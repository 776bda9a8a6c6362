-- The actions of a PersistShard: each one is a request, which the operator handles once.
local status = obj.status or {}
local paused = (obj.metadata.annotations or {})["persistshard.io/paused"]
local suspended = (obj.spec ~= nil and obj.spec.suspend == true) or (paused ~= nil and paused ~= "false")
local plan = status.plan or {}
return {
  compact = {disabled = suspended},
  gc = {disabled = suspended},
  rollup = {disabled = suspended},
  verify = {disabled = suspended},
  ["orphan-scan"] = {disabled = suspended},
  approve = {disabled = plan.id == nil or plan.approved ~= false},
}
