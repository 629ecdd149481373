# Start Valkey on /etc/valkey/valkey.conf with the password of $PASSWORD_FILE, which is in no process list.
set -eu
password="$(cat "${PASSWORD_FILE}")"
case "${password}" in
  *[!A-Za-z0-9]* | "")
    echo "the password must be letters and digits: it becomes part of a URL" >&2
    exit 1
    ;;
esac
exec valkey-server - <<CONFIG
$(sed "s/^user default on /user default on >${password} /" /etc/valkey/valkey.conf)
CONFIG
