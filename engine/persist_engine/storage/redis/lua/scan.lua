-- ARGV[3]: first seqno wanted. ARGV[4]: maximum number of entries. ARGV[5]: maximum bytes, but at least one entry is returned.
-- The first entry returned has the seqno max(ARGV[3], low).
if not exists then
  return {'ABSENT'}
end
local skip = math.max(0, minus(ARGV[3], low))
if skip >= count then
  return {'OK', low, head, {}}
end
local entries = redis.call('LRANGE', list, skip, math.min(count, skip + tonumber(ARGV[4])) - 1)
local bytes = 0
for index, entry in ipairs(entries) do
  bytes = bytes + #entry
  if index > 1 and bytes > tonumber(ARGV[5]) then
    for beyond = #entries, index, -1 do
      entries[beyond] = nil
    end
    break
  end
end
return {'OK', low, head, entries}
