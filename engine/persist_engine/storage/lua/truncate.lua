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
redis.call('LTRIM', list, dropped, -1)
redis.call('HSET', meta, 'l', ARGV[3])
return {'OK', dropped}
