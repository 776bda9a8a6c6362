-- ARGV[3]: expected head and tag of its entry, as `head:tag`. ARGV[4]: the new seqno. ARGV[5]: its data, from then on the only
-- entry. ARGV[6]: `seqno:tag` of it.
if (tip or '') ~= ARGV[3] then
  return {'MISMATCH', head or ''}
end
-- Takes nothing, and shows whether an ACL allows the trim before anything is changed.
redis.call('LTRIM', list, 0, -1)
redis.call('RPUSH', list, ARGV[5])
local noted = redis.pcall('HSET', meta, 'h', ARGV[4], 'l', ARGV[4], 't', ARGV[6])
if type(noted) == 'table' and noted.err then
  redis.call('LTRIM', list, 0, -2)
  return noted
end
redis.call('LTRIM', list, -1, -1)
return {'OK'}
