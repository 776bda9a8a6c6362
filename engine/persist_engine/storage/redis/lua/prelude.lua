-- Stands before every verb. KEYS: meta hash {e, run, h, l, t}, list of entries l..h in order.
-- ARGV[1]: epoch the caller works in. ARGV[2]: the highest head the caller has seen of this log, or ''; where it knows that
-- entry, as `head:tag`. t is the same of the newest entry.
-- Seqnos travel as decimal strings: Lua's numbers are exact only below 2^53. Replies start with a status word.
-- SUBTLE: Lua has no rollback. Every check stands before the first write. After it only an ACL can refuse one (it forbids one
-- of two commands): the first is then undone, or the log would be taken for corrupt for ever.
local meta, list = KEYS[1], KEYS[2]

local function halves(seqno)
  local padded = string.rep('0', 19 - #seqno) .. seqno
  return tonumber(string.sub(padded, 1, 10)), tonumber(string.sub(padded, 11))
end

-- a - b, exact when they are close, with the right sign and about the right size when they are not.
local function minus(a, b)
  local a_high, a_low = halves(a)
  local b_high, b_low = halves(b)
  return (a_high - b_high) * 1e9 + (a_low - b_low)
end

local found = redis.call('HMGET', meta, 'e', 'run', 'h', 'l', 't')
local epoch, run, head, low, tip = found[1], found[2], found[3], found[4], found[5]
local seen = string.match(ARGV[2], '^%d*')
local count = redis.call('LLEN', list)
local exists = epoch or head or low or count > 0

if exists and (not (epoch and head and low) or minus(head, low) + 1 ~= count) then
  return {'CORRUPT', head or 'none', low or 'none', count}
end
if exists and epoch ~= ARGV[1] then
  return {'EPOCH', epoch}
end
if seen ~= '' and (not exists or minus(head, seen) < 0) then
  return {'LOST', head or 'none'}
end
if seen == head and seen ~= ARGV[2] and tip ~= ARGV[2] then
  return {'OTHER', head}
end
