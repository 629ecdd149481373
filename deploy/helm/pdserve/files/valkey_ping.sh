# Exit 0 when Valkey answers to the password of $PASSWORD_FILE on $PORT.
set -eu
REDISCLI_AUTH="$(cat "${PASSWORD_FILE}")"
export REDISCLI_AUTH
test "$(valkey-cli -p "${PORT}" ping)" = PONG
