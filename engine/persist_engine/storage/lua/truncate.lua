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
redis.call('HSET', meta, 'l', ARGV[3])
local trimmed = redis.pcall('LTRIM', list, dropped, -1)
if type(trimmed) == 'table' and trimmed.err then
  redis.call('HSET', meta, 'l', low)
  return trimmed
end
return {'OK', dropped}
