-- ARGV[3]: the lowest seqno to keep. ARGV[4]: the seqno of the entry that the log must have. ARGV[5]: SHA-1 of that entry, or '' to fetch
-- it before anything is decided.
if not exists or minus(ARGV[4], head) > 0 then
  return {'MISMATCH'}
end
local known = minus(ARGV[4], low)
if known < 0 then
  return {'OK', 0}
end
local entry = redis.call('LINDEX', list, known)
if ARGV[5] == '' then
  return {'ENTRY', entry}
end
if redis.sha1hex(entry) ~= ARGV[5] then
  return {'MISMATCH'}
end
local dropped = minus(ARGV[3], low)
if dropped <= 0 then
  return {'OK', 0}
end
-- SUBTLE: Redis refuses HSET when memory is full, unless another write precedes it in the same script. Truncating is what frees
-- memory, so a write that removes nothing comes first. It also shows whether an ACL allows LTRIM before anything changes.
redis.call('LTRIM', list, 0, -1)
redis.call('HSET', meta, 'l', ARGV[3])
redis.call('LTRIM', list, dropped, -1)
return {'OK', dropped}
