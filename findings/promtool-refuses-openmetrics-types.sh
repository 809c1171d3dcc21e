#!/bin/bash
# promtool of Prometheus 2.42.0 (Debian 12): `check metrics` refuses OpenMetrics that Prometheus
# itself scrapes.
#
# The server asks for OpenMetrics first (Accept: application/openmetrics-text), whose types include
# info. `promtool check metrics` reads the older text format alone and fails on such a type, so what
# the server takes cannot be checked by its own tool, unless it is also offered in that format.
#
# Seen:
#   older: status 0
#   OpenMetrics: status 1: error while linting: text format parsing error in line 1: unknown metric
#   type "info"
#
# It fails if that changes. It needs apt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
cd "$folder"

apt-get -q download prometheus=2.42.0+ds-5+deb12u1 >/dev/null 2>&1
dpkg -x prometheus_*.deb unpacked
promtool=unpacked/usr/bin/promtool

printf '%s\n' '# HELP build_info The build.' '# TYPE build_info gauge' \
    'build_info{version="1.0"} 1' > older
printf '%s\n' '# TYPE build info' '# HELP build The build.' \
    'build_info{version="1.0"} 1' '# EOF' > openmetrics
$promtool check metrics < older
echo "older: status 0"
status=0
said=$($promtool check metrics < openmetrics 2>&1) || status=$?
echo "OpenMetrics: status $status: $said"
[ "$status" = 1 ]
[[ "$said" == *'unknown metric type "info"'* ]]
