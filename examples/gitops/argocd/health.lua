-- The health of a PersistShard or a SparkSink, by its conditions. Set in argocd-cm for both kinds.
local waiting = "waits for the operator"
if obj.metadata.deletionTimestamp ~= nil then
  return {status = "Progressing", message = "being deleted"}
end
if obj.status == nil or obj.status.conditions == nil then
  return {status = "Progressing", message = waiting}
end
-- What the status says is about an earlier spec.
if obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = waiting}
end
local found = {}
for _, condition in ipairs(obj.status.conditions) do
  found[condition.type] = condition
end
local function holds(kind)
  return found[kind] ~= nil and found[kind].status == "True"
end
local function because(condition)
  if condition == nil then
    return waiting
  end
  if condition.message == nil or condition.message == "" then
    return condition.reason
  end
  return condition.reason .. ": " .. condition.message
end
-- Before Suspended: a driver that is being stopped still runs.
if holds("Reconciling") then
  return {status = "Progressing", message = because(found.Ready)}
end
-- Before Stalled: it is an order, not a fault.
if holds("Suspended") then
  return {status = "Suspended", message = because(found.Suspended)}
end
if holds("Stalled") then
  return {status = "Degraded", message = because(found.Stalled)}
end
if holds("Ready") then
  return {status = "Healthy", message = because(found.Ready)}
end
return {status = "Progressing", message = because(found.Ready)}
