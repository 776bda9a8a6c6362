if not exists then
  return {'ABSENT'}
end
return {'OK', head, redis.call('LINDEX', list, -1)}
