-- Prepended to every verb. KEYS: meta hash {e, run, h, l, t}, list of entries l..h in order.
-- ARGV[1]: the caller's epoch. ARGV[2]: the highest head of this log that the caller knows, or ''; as `head:tag` if the caller
-- knows that entry. t is the `head:tag` of the newest entry.
-- Seqnos are passed as decimal strings, because Lua's numbers are exact only below 2^53. Replies begin with a status word.
-- The last argument is the name of the call: the client lets each reply end with it.
-- SUBTLE: Lua has no rollback, so every check precedes the first write. After that, only an ACL can refuse a write (it may forbid one of
-- two commands). The first write is then undone; otherwise the log would count as corrupt forever.
local meta, list = KEYS[1], KEYS[2]

local function halves(seqno)
  local padded = string.rep('0', 19 - #seqno) .. seqno
  return tonumber(string.sub(padded, 1, 10)), tonumber(string.sub(padded, 11))
end

-- a - b: exact if they are close; otherwise the right sign and about the right size.
local function minus(a, b)
  local a_high, a_low = halves(a)
  local b_high, b_low = halves(b)
  return (a_high - b_high) * 1e9 + (a_low - b_low)
end

local found = redis.call('HMGET', meta, 'e', 'run', 'h', 'l', 't')
local epoch, run, head, low, tip = found[1], found[2], found[3], found[4], found[5]
local known = string.match(ARGV[2], '^%d*')
local count = redis.call('LLEN', list)
local exists = epoch or head or low or count > 0

if exists and (not (epoch and head and low) or minus(head, low) + 1 ~= count) then
  return {'CORRUPT', head or 'none', low or 'none', count}
end
if exists and epoch ~= ARGV[1] then
  return {'EPOCH', epoch}
end
if known ~= '' and (not exists or minus(head, known) < 0) then
  return {'LOST', head or 'none'}
end
if known == head and known ~= ARGV[2] and tip ~= ARGV[2] then
  return {'OTHER', head}
end
