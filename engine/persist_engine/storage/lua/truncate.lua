-- ARGV[3]: the lowest seqno to keep.
if not exists then
  return {'ABSENT'}
end
if minus(ARGV[3], head) > 0 then
  return {'PAST', head}
end
local dropped = minus(ARGV[3], low)
if dropped <= 0 then
  return {'OK', 0}
end
-- SUBTLE: HSET is refused where memory is full, unless another write stands before it in the same script. So the first is one
-- that takes nothing: truncating is what makes room. It also shows whether an ACL allows the trim, before anything is changed.
redis.call('LTRIM', list, 0, -1)
redis.call('HSET', meta, 'l', ARGV[3])
redis.call('LTRIM', list, dropped, -1)
return {'OK', dropped}
