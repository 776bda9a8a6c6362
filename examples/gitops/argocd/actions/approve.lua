-- Approves the plan that status shows. The approval of a plan that has changed meanwhile has no effect.
if obj.status == nil or obj.status.plan == nil or obj.status.plan.id == nil then
  error("no plan waits for an approval")
end
if obj.metadata.annotations == nil then
  obj.metadata.annotations = {}
end
obj.metadata.annotations["persistshard.io/request-approve"] = obj.status.plan.id
return obj
