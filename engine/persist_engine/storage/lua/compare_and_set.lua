-- ARGV[3]: expected head or ''. ARGV[4]: the new seqno. ARGV[5]: its data.
if (head or '') ~= ARGV[3] then
  return {'MISMATCH', head or ''}
end

-- Which process this is; '' where an ACL forbids INFO.
local info = redis.pcall('INFO', 'server')
local here = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''

redis.call('RPUSH', list, ARGV[5])
if not exists then
  redis.call('HSET', meta, 'e', ARGV[1], 'run', here, 'h', ARGV[4], 'l', ARGV[4])
  return {'OK', 0}
end
redis.call('HSET', meta, 'run', here, 'h', ARGV[4])
return {'OK', run ~= here and 1 or 0}
