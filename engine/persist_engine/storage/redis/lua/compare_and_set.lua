-- ARGV[3]: expected tip as `head:tag`, or ''. ARGV[4]: the new seqno. ARGV[5]: its data.
-- ARGV[6]: channel for news, or ''. ARGV[7]: above this many bytes, news carries only the seqno.
-- ARGV[8]: `seqno:tag` of the new entry.
if (tip or '') ~= ARGV[3] then
  return {'MISMATCH', head or ''}
end

-- Identifies the Redis process; '' if an ACL forbids INFO.
local info = redis.pcall('INFO', 'server')
local here = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''

redis.call('RPUSH', list, ARGV[5])
local noted
if exists then
  noted = redis.pcall('HSET', meta, 'run', here, 'h', ARGV[4], 't', ARGV[8])
else
  noted = redis.pcall('HSET', meta, 'e', ARGV[1], 'run', here, 'h', ARGV[4], 'l', ARGV[4], 't', ARGV[8])
end
if type(noted) == 'table' and noted.err then
  redis.call('LTRIM', list, 0, -2)
  return noted
end
if ARGV[6] ~= '' then
  -- pcall: an ACL may forbid PUBLISH, and a commit must not fail for lack of news.
  redis.pcall('PUBLISH', ARGV[6], #ARGV[5] > tonumber(ARGV[7]) and ARGV[4] or ARGV[4] .. ' ' .. ARGV[5])
end
return {'OK', exists and run ~= here and 1 or 0}
