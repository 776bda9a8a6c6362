-- The actions of a SparkSink: each one is a request, which the operator handles once.
local state = ((obj.status or {}).rollout or {}).state
local paused = (obj.metadata.annotations or {})["persistshard.io/paused"]
local suspended = (obj.spec ~= nil and obj.spec.suspend == true) or (paused ~= nil and paused ~= "false")
return {
  restart = {disabled = suspended},
  promote = {disabled = suspended or state == nil or state == "RolledBack" or state == "Promoting"},
}
