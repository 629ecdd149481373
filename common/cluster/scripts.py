"""The Lua scripts of the index, for Redis 6.2 and later. Data only.

A script is what makes check-and-write one step: nothing is written for a worker whose lease has ended, and no
batch is applied twice or out of order. Hashes come packed in one argument; `SADD` takes them in slices because Lua
can unpack only some thousand values onto its stack.

Order inside a script matters when Redis is out of memory: it refuses the first write that may grow, unless the
script has written before. So additions come first (refused as a whole), and removals never need memory.
"""

_SLICED = """
local function sliced(command, key, packed)
  local width, slice = tonumber(ARGV[1]), {}
  for at = 1, #packed, width do
    slice[#slice + 1] = string.sub(packed, at, at + width - 1)
    if #slice == 1000 then redis.call(command, key, unpack(slice)); slice = {} end
  end
  if #slice > 0 then redis.call(command, key, unpack(slice)) end
end
"""

# Routers hear of a change: "number before, number after, bytes added, ref" and a line end, then the members added and
# those removed. A number before of -1: the set was emptied; of the same: the worker lives. A change is applied even
# where it cannot be published.

# KEYS: lease, members, sequence. ARGV: member width, ttl ms, expected sequence, added, removed, channel, ref, expected
# number of members. Answers the new sequence number, the new number of members and why nothing could be published,
# if so; -1 for a gap (a batch missed, members evicted or deleted), -2 when there is no lease.
APPLY = (
    _SLICED
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return -2 end
if redis.call('GET', KEYS[3]) ~= ARGV[3] then return -1 end
if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[8]) then return -1 end
sliced('SADD', KEYS[2], ARGV[4])
sliced('SREM', KEYS[2], ARGV[5])
local ttl, sequence = tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
if #ARGV[4] + #ARGV[5] > 0 then
  sequence = sequence + 1
  redis.call('SET', KEYS[3], sequence, 'PX', ttl)
end
local head = table.concat({ARGV[3], sequence, #ARGV[4], ARGV[7]}, ' ')
local published = redis.pcall('PUBLISH', ARGV[6], head .. '\\n' .. ARGV[4] .. ARGV[5])
return {sequence, redis.call('SCARD', KEYS[2]), type(published) == 'table' and published.err or ''}
"""
)

# Start over with an empty set. KEYS: lease, members, sequence. ARGV: ttl ms, new sequence, channel, ref.
RESET = """
if redis.call('EXISTS', KEYS[1]) == 0 then return -2 end
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[3], ARGV[2], 'PX', tonumber(ARGV[1]))
redis.pcall('PUBLISH', ARGV[3], table.concat({-1, ARGV[2], 0, ARGV[4]}, ' ') .. '\\n')
return tonumber(ARGV[2])
"""

# KEYS: lease, workers, members, sequence. ARGV: ttl ms, ttl of the list ms, ref, registration.
RENEW = """
local ttl = tonumber(ARGV[1])
redis.call('PEXPIRE', KEYS[3], ttl)
redis.call('PEXPIRE', KEYS[4], ttl)
if redis.call('PEXPIRE', KEYS[1], ttl) == 0 then redis.call('SET', KEYS[1], ARGV[4], 'PX', ttl) end
local added = redis.pcall('SADD', KEYS[2], ARGV[3])
if type(added) ~= 'number' then
  redis.call('DEL', KEYS[2])
  redis.call('SADD', KEYS[2], ARGV[3])
end
redis.call('PEXPIRE', KEYS[2], tonumber(ARGV[2]))
return 1
"""

# KEYS: workers. ARGV: prefix of the lease keys, longest registration accepted in bytes.
# Answers the registrations of those with a lease, ref before value, and forgets the others. The first line changes
# nothing: a server that takes no writes refuses it, as leases that cannot be renewed say nothing of who lives.
LIVE = """
redis.call('SREM', KEYS[1], '')
local answer = {}
for _, ref in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. ref
  local value = redis.pcall('GETRANGE', key, 0, tonumber(ARGV[2]))
  if type(value) == 'string' and #value > 0 and #ref <= tonumber(ARGV[2]) then
    answer[#answer + 1] = ref
    answer[#answer + 1] = value
  else
    redis.call('SREM', KEYS[1], ref)
  end
end
return answer
"""
