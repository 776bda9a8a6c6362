-- ARGV[3]: expected tip as `head:tag`. ARGV[4]: the new seqno. ARGV[5]: its data, which becomes the only entry.
-- ARGV[6]: its `seqno:tag`.
if (tip or '') ~= ARGV[3] then
  return {'MISMATCH', head or ''}
end
-- Removes nothing. Shows whether an ACL allows LTRIM before anything changes.
redis.call('LTRIM', list, 0, -1)
redis.call('RPUSH', list, ARGV[5])
local noted = redis.pcall('HSET', meta, 'h', ARGV[4], 'l', ARGV[4], 't', ARGV[6])
if type(noted) == 'table' and noted.err then
  redis.call('LTRIM', list, 0, -2)
  return noted
end
redis.call('LTRIM', list, -1, -1)
return {'OK'}
