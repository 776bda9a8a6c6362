-- ARGV[3]: the lowest seqno to keep. ARGV[4]: SHA-1 of its entry, or '' to fetch that entry before anything is decided.
if not exists or minus(ARGV[3], head) > 0 then
  return {'MISMATCH'}
end
local dropped = minus(ARGV[3], low)
if dropped < 0 then
  return {'OK', 0}
end
local kept = redis.call('LINDEX', list, dropped)
if ARGV[4] == '' then
  return {'ENTRY', kept}
end
if redis.sha1hex(kept) ~= ARGV[4] then
  return {'MISMATCH'}
end
if dropped == 0 then
  return {'OK', 0}
end
-- SUBTLE: Redis refuses HSET when memory is full, unless another write precedes it in the same script. Truncating is what frees
-- memory, so a write that removes nothing comes first. It also shows whether an ACL allows LTRIM before anything changes.
redis.call('LTRIM', list, 0, -1)
redis.call('HSET', meta, 'l', ARGV[3])
redis.call('LTRIM', list, dropped, -1)
return {'OK', dropped}
