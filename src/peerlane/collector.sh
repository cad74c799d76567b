#!/bin/sh
# Peerlane's collector for a machine without Ansible or Python. It changes nothing; it writes one folder.
#
#   sh collect.sh [-z] [-s] [-t SECONDS] [FOLDER]
#
#   FOLDER      where the snapshot goes (default: ./HOST)
#   -z          pack it too: FOLDER.tar.gz
#   -s          keep serial numbers; they are masked otherwise
#   -t SECONDS  how long one source may take (default 20)
#
# Run it as root to read PCI config space, the kernel log and the Proxmox configuration; what needs root says so else.
# Never read: whole environments, keys, tokens. Look at the folder, then judge it with:  peerlane audit --from FOLDER

set -u
umask 077
LC_ALL=C
LANG=C
export LC_ALL LANG
PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/nvidia/bin:/opt/bin"
export PATH

max_bytes=2097152
timeout_s=20
pack=no
serials=no

say() { printf '%s\n' "$*" >&2; }

usage() {
    say "usage: sh collect.sh [-z] [-s] [-t SECONDS] [FOLDER]"
    exit 2
}

while getopts zst: option; do
    case $option in
        z) pack=yes ;;
        s) serials=yes ;;
        t) timeout_s=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -le 1 ] || usage
case $timeout_s in '' | *[!0-9]* | 0) say "collect.sh: -t $timeout_s: is no number of seconds"; exit 2 ;; esac

host=$(uname -n)
case $host in '' | -* | *[!A-Za-z0-9._-]*) host=host ;; esac
folder=${1:-$host}
case $folder in -*) folder=./$folder ;; esac
if [ -e "$folder" ] && [ -n "$(ls -A "$folder" 2>/dev/null)" ]; then
    say "collect.sh: $folder: exists and is not empty; name another folder"
    exit 2
fi
mkdir -p "$folder" || { say "collect.sh: $folder: cannot be made; name another folder"; exit 2; }
work=$(mktemp -d "${TMPDIR:-/tmp}/peerlane.XXXXXX") || { say "collect.sh: no room for temporary files"; exit 2; }
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
: >"$work/rows"

# --- small things

# The stripped first line of a small file in $value; status 1 where it cannot be read.
value_of() {
    value=
    [ -r "$1" ] || return 1
    { read -r value <"$1" || [ -n "$value" ]; } 2>/dev/null && return 0
    # Some files of sysfs give nothing to a shell, which reads byte by byte.
    value=$(head -n 1 "$1" 2>/dev/null)
    [ -n "$value" ]
}

# Hundredths of a second since boot.
now() {
    read -r uptime _ 2>/dev/null </proc/uptime || uptime=0.00
    seconds=${uptime%.*}
    hundredths=${uptime#*.}
    printf '%s\n' "$((seconds * 100 + ${hundredths#0}))"
}

# Standard input as the inside of a JSON string, each line with its end.
json() {
    tab=$(printf '\t')
    return_key=$(printf '\r')
    tr -d '\000-\010\013\014\016-\037\177' |
        sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e "s/$tab/\\\\t/g" -e "s/$return_key/\\\\r/g" |
        awk '{ printf "%s\\n", $0 }'
}

json_word() {
    escaped=$(printf '%s\n' "$1" | json)
    printf '"%s"' "${escaped%\\n}"
}

# Runs a command within the time limit, its output in $work/out and $work/err. $status is empty where it was ended.
limited() {
    rm -f "$work/late"
    "$@" >"$work/out" 2>"$work/err" </dev/null &
    child=$!
    (
        waited=0
        while [ "$waited" -lt "$limit" ]; do
            sleep 1
            kill -0 "$child" 2>/dev/null || exit 0
            waited=$((waited + 1))
        done
        : >"$work/late"
        kill -TERM "$child"
        sleep 1
        kill -KILL "$child"
    ) >/dev/null 2>&1 &
    wait "$child" 2>/dev/null
    status=$?
    [ ! -e "$work/late" ] || status=
}

# Inside a probe: a command with a time limit of its own, where this machine has `timeout`.
brief() {
    if command -v timeout >/dev/null 2>&1; then
        timeout "$timeout_s" "$@"
    else
        "$@"
    fi
}

# What must not leave the machine: passwords and keys, and unless asked for, serial numbers.
hide() {
    sed -E \
        -e 's/^(((cur|new|del) )?(cipassword|sshkeys): *)[^ ].*$/\1[masked]/' \
        -e "s/(^|[^A-Za-z0-9_])(passwd=['\"])[^'\"]*/\\1\\2[masked]/g" \
        -e "s/(<qemu:env[^>]* value=['\"])[^'\"]*/\\1[masked]/g" \
        -e "s/(<entry name=['\"]serial['\"]>)[^<]*/\\1[masked]/g" \
        -e 's/(<serial>)[^<]*/\1[masked]/g' \
        -e 's/(^|[^A-Za-z0-9_])(serial=)[^,[:space:]]+/\1\2[masked]/g' \
        -e 's/^([[:blank:]]+Name[[:blank:]]+: [^[:space:]]+ )[^[:space:]].*$/\1[masked]/' |
        if [ "$serials" = yes ]; then
            cat
        else
            sed -E \
                -e '/: (N\/A|GPU requires)/!s/^([[:blank:]]*(Chassis )?Serial Number[[:blank:]]+: )[^[:space:]].*$/\1[masked]/' \
                -e 's/(NVRM: .{0,40}[Ss]erial [Nn]umber(: | is ))[0-9]+/\1[masked]/g' \
                -e 's/(Device Serial Number )[0-9a-fA-F-]+/\1[masked]/g'
        fi
}

# Where a source can be at all.
on_the_bus=no
for vendor in /sys/bus/pci/devices/*/vendor; do
    if value_of "$vendor" && [ "$value" = 0x10de ]; then
        on_the_bus=yes
        break
    fi
done
[ ! -d /proc/driver/nvidia ] || on_the_bus=yes

why_not() {
    case $1 in
        gpu) [ "$on_the_bus" = yes ] || printf 'no NVIDIA function on the PCI bus' ;;
        proxmox) [ -d /etc/pve ] || printf '/etc/pve is not there' ;;
        libvirt) [ -d /etc/libvirt/qemu ] || printf '/etc/libvirt/qemu is not there' ;;
        hypervisor)
            [ -d /etc/pve ] || [ -d /etc/libvirt/qemu ] || printf 'neither /etc/pve nor /etc/libvirt/qemu is there'
            ;;
    esac
}

# record SOURCE COMMAND PATH RC REASON STARTED: one row of the manifest, with $work/out and $work/err.
record() {
    truncated=false
    file=
    if [ -s "$work/out" ]; then
        size=$(wc -c <"$work/out")
        file=$1.txt
        if [ "$size" -le "$max_bytes" ]; then
            cat "$work/out"
        elif [ "$1" = kernel_log ]; then
            truncated=true
            head -c "$((max_bytes / 4))" "$work/out" | sed '$d'
            tail -c "$((max_bytes * 3 / 4))" "$work/out" | sed 1d
        else
            truncated=true
            head -c "$max_bytes" "$work/out"
        fi | hide >"$folder/$file"
        [ "$size" -le "$max_bytes" ] || truncated=true
    fi
    {
        [ ! -s "$work/rows" ] || printf ',\n'
        printf '  {"source": %s, "command": %s, "path": %s, ' "$(json_word "$1")" "$(json_word "$2")" "$(json_word "$3")"
        printf '"rc": %s, "reason": %s, ' "${4:-null}" "$(json_word "$5")"
        [ -z "$file" ] || printf '"file": %s, ' "$(json_word "$file")"
        printf '"stderr": "%s", ' "$(head -c 65536 "$work/err" | hide | json)"
        printf '"truncated": %s, "elapsed_ms": %s}' "$truncated" "$((($(now) - $6) * 10))"
    } >"$work/row"
    cat "$work/row" >>"$work/rows"
}

nothing() {
    : >"$work/out"
    : >"$work/err"
}

absent() {
    nothing
    record "$1" "" "$2" "" "$3" "$(now)"
}

# --- the kinds of source (evidence_sources.py)

command_source() {
    source=$1 where=$2
    shift 2
    why=$(why_not "$where")
    if [ -n "$why" ]; then
        absent "$source" "" "$why"
        return
    fi
    nothing
    started=$(now)
    if ! command -v "$1" >/dev/null 2>&1; then
        record "$source" "$*" "" "" "$1: command not found" "$started"
        return
    fi
    limit=$timeout_s
    limited "$@"
    why=
    [ -n "$status" ] || why="no answer within $timeout_s s"
    record "$source" "$*" "" "$status" "$why" "$started"
}

# Why a file cannot be read; nothing where it can.
unreadable() {
    if [ ! -e "$1" ]; then
        printf '%s: No such file or directory' "$1"
    elif [ ! -r "$1" ]; then
        printf '%s: Permission denied' "$1"
    fi
}

file_source() {
    source=$1 where=$2 path=$3
    why=$(why_not "$where")
    if [ -n "$why" ]; then
        absent "$source" "" "$why"
        return
    fi
    why=$(unreadable "$path")
    if [ -n "$why" ]; then
        absent "$source" "$path" "$why"
        return
    fi
    started=$(now)
    limit=$timeout_s
    limited head -c "$((max_bytes + 1))" "$path"
    why=
    if [ -z "$status" ]; then
        why="$path: no answer within $timeout_s s"
    elif [ "$status" != 0 ]; then
        why="$path: $(sed -n '$s/.*: //p' "$work/err")"
    fi
    : >"$work/err"
    record "$source" "" "$path" "" "$why" "$started"
}

# The folder of a pattern that this user may not list; then no match does not mean that there is none.
closed_folder() {
    above=${1%/*}
    while [ -n "$above" ] && [ ! -d "$above" ]; do
        case $above in *[*?[]*) return ;; esac
        above=${above%/*}
    done
    [ -z "$above" ] || { [ -r "$above" ] && [ -x "$above" ]; } || printf '%s' "$above"
}

no_match() {
    closed=$(closed_folder "$2")
    if [ -n "$closed" ]; then
        absent "$1" "$2" "$closed: Permission denied, needs root"
    else
        absent "$1" "$2" "no file matches $2"
    fi
}

# has_no_files SOURCE WHERE PATTERN FILE: whether the source has none here; why is then recorded.
has_no_files() {
    why=$(why_not "$2")
    if [ -n "$why" ]; then
        absent "$1" "" "$why"
    elif [ ! -e "$4" ] && [ ! -L "$4" ]; then
        no_match "$1" "$3"
    else
        return 1
    fi
}

# files_source SOURCE WHERE PATTERN FILE...: the shell filled in the files, or left the pattern where none matches.
files_source() {
    if has_no_files "$1" "$2" "$3" "$4"; then return; fi
    source=$1 pattern=$3
    shift 3
    nothing
    started=$(now)
    for path in "$@"; do
        why=$(unreadable "$path")
        if [ -n "$why" ]; then
            printf '%s\n' "$why" >>"$work/err"
            continue
        fi
        printf '# ==> %s <==\n' "$path" >>"$work/out"
        head -c "$max_bytes" "$path" >>"$work/out" 2>>"$work/err"
        [ -z "$(tail -c 1 "$work/out")" ] || printf '\n' >>"$work/out"
    done
    why=
    [ -s "$work/out" ] || why=$(head -n 1 "$work/err")
    record "$source" "" "$pattern" "" "$why" "$started"
}

each_source() {
    if has_no_files "$1" "$2" "$3" "$4"; then return; fi
    family=$1
    shift 3
    for path in "$@"; do
        stem=${path##*/}
        stem=${stem%.*}
        case $stem in '' | *[!A-Za-z0-9_.@:+-]*) continue ;; esac
        file_source "$family.$stem" any "$path"
    done
}

# A probe says with status 9 that the machine has no such thing; the last line of its complaint is the reason.
probe_source() {
    source=$1 where=$2 probe=$3
    why=$(why_not "$where")
    if [ -n "$why" ]; then
        absent "$source" "" "$why"
        return
    fi
    started=$(now)
    limit=$((timeout_s * 3))
    limited "probe_$probe"
    why=
    if [ -z "$status" ]; then
        why="no answer within $limit s"
    elif [ "$status" = 9 ]; then
        why=$(sed -n '$p' "$work/err")
        nothing
    fi
    record "$source" "" "" "" "$why" "$started"
}

not_here() {
    printf '%s\n' "$*" >&2
    exit 9
}

# --- probes (evidence_probes.py, platform_probes.py, engine_probes.py)

probe_first_cpu() {
    [ -r /proc/cpuinfo ] || not_here "/proc/cpuinfo: No such file or directory"
    awk '/^processor/ { n++ } /^$/ { done = 1 } !done { print } END { print "processors\t: " n }' /proc/cpuinfo
}

probe_dmi() {
    [ -d /sys/class/dmi/id ] || not_here "/sys/class/dmi/id is not there"
    for name in product_name sys_vendor board_name bios_version product_uuid; do
        if value_of "/sys/class/dmi/id/$name"; then
            printf '%s: %s\n' "$name" "$value"
        elif [ -e "/sys/class/dmi/id/$name" ] && [ ! -r "/sys/class/dmi/id/$name" ]; then
            printf '%s\n' "/sys/class/dmi/id/$name needs root" >&2
        fi
    done
}

# Config space as hex, without the bytes of the Device Serial Number (extended capability 0003) and zeros at the end.
config_hex() {
    od -An -v -tx1 -N4096 "$1" 2>/dev/null | tr -d ' \n' | awk -v keep="$serials" '
        function number(hex,    at, sum) {
            for (at = 1; at <= length(hex); at++) sum = sum * 16 + index("0123456789abcdef", substr(hex, at, 1)) - 1
            return sum
        }
        function byte(place) { return substr($0, place * 2 + 1, 2) }
        {
            total = length($0) / 2
            place = 256
            for (seen = 0; seen < 96 && place >= 256 && place + 4 <= total; seen++) {
                header = byte(place + 3) byte(place + 2) byte(place + 1) byte(place)
                if (keep == "no" && substr(header, 5, 4) == "0003") {
                    size = total - place - 4
                    if (size > 8) size = 8
                    zeros = substr("0000000000000000", 1, size * 2)
                    $0 = substr($0, 1, (place + 4) * 2) zeros substr($0, (place + 4 + size) * 2 + 1)
                    break
                }
                place = number(substr(header, 1, 3))
            }
            if (total == 0) next
            first = substr($0, 1, 2)
            sub(/(00)*$/, "")
            print "config_bytes: " total
            print "config: " ($0 == "" ? first : $0)
        }'
}

probe_pci() {
    [ -d /sys/bus/pci/devices ] || not_here "/sys/bus/pci/devices is not there"
    gap=
    for place in /sys/bus/pci/devices/*; do
        [ -e "$place" ] || continue
        printf '%s[%s]\n' "$gap" "${place##*/}"
        gap='
'
        vendor=
        class=
        for name in vendor device class revision numa_node current_link_speed current_link_width max_link_speed \
            max_link_width reset_method power_state d3cold_allowed boot_vga; do
            value_of "$place/$name" || continue
            printf '%s: %s\n' "$name" "$value"
            case $name in vendor) vendor=$value ;; class) class=$value ;; esac
        done
        target=
        [ ! -e "$place/driver" ] || target=$(readlink "$place/driver")
        printf 'driver: %s\n' "${target##*/}"
        for name in iommu_group physfn; do
            [ -e "$place/$name" ] || continue
            target=$(readlink "$place/$name")
            printf '%s: %s\n' "$name" "${target##*/}"
        done
        above=$(readlink -f "$place")
        above=${above%/*}
        above=${above##*/}
        case $above in *:??:??.[0-7]) printf 'parent: %s\n' "$above" ;; esac
        if [ -s "$place/resource" ] || [ -r "$place/resource" ]; then
            awk '{ printf "%s%s", (NR > 1 ? ";" : "resource: "), $0 } END { if (NR) print "" }' "$place/resource"
        fi
        case $vendor:$class in
            0x10de:* | 0x15b3:* | *:0x0604*)
                config_hex "$place/config"
                for name in aer_dev_correctable aer_dev_nonfatal aer_dev_fatal; do
                    told=
                    [ ! -r "$place/$name" ] || told=$(awk '
                        $2 != "0" || $1 ~ /^TOTAL/ { printf "%s%s %s", (n++ ? " " : ""), $1, $2 }' "$place/$name")
                    printf '%s: %s\n' "$name" "${told:-absent}"
                done
                ;;
        esac
    done
}

probe_iommu() {
    if [ ! -d /sys/class/iommu ] && [ ! -d /sys/kernel/iommu_groups ]; then
        not_here "neither /sys/class/iommu nor /sys/kernel/iommu_groups is there"
    fi
    for place in /sys/class/iommu/*; do
        [ ! -e "$place" ] || printf 'unit %s\n' "${place##*/}"
    done
    count=0
    for number in $(for place in /sys/kernel/iommu_groups/[0-9]*; do printf '%s\n' "${place##*/}"; done | sort -n); do
        place=/sys/kernel/iommu_groups/$number
        [ -d "$place" ] || continue
        value_of "$place/type" || value=unknown
        printf 'group %s type %s devices' "$number" "$value"
        for device in "$place"/devices/*; do
            [ ! -e "$device" ] || printf ' %s' "${device##*/}"
        done
        printf '\n'
        count=$((count + 1))
    done
    printf 'groups %s\n' "$count"
}

probe_kernel_log() {
    if brief dmesg >"$work/log" 2>"$work/complaint" && [ -s "$work/log" ]; then
        cat "$work/log"
    elif command -v journalctl >/dev/null 2>&1 &&
        brief journalctl -k -b -o short-iso --no-pager >"$work/log" 2>/dev/null && grep -q ' kernel: ' "$work/log"; then
        cat "$work/log"
        printf 'from journalctl; %s\n' "$(sed -n '$p' "$work/complaint")" >&2
    else
        not_here "$(sed -n '$p' "$work/complaint")"
    fi
}

probe_boot() {
    if [ -d /sys/firmware/efi ]; then echo "efi: yes"; else echo "efi: no"; fi
    variables=/sys/firmware/efi/efivars
    loader=$variables/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f
    secure=$variables/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
    if [ -r "$loader" ]; then printf 'loader_info: %s\n' "$(tail -c +5 "$loader" | tr -d '\000')"; fi
    if [ -r "$secure" ]; then printf 'secure_boot: %s\n' "$(od -An -tu1 -j4 -N1 "$secure" | tr -d ' ')"; fi
}

probe_kernels() {
    running=$(uname -r)
    {
        printf '%s\n' "$running"
        for place in /lib/modules/*; do [ ! -d "$place" ] || printf '%s\n' "${place##*/}"; done
        for place in /boot/vmlinuz-*; do [ ! -e "$place" ] || printf '%s\n' "${place##*/vmlinuz-}"; done
    } | sort -u | while read -r release; do
        place=/lib/modules/$release
        modules=no headers=no image=no active=no
        if [ -e "$place/modules.dep" ] || [ -d "$place/kernel" ]; then modules=yes; fi
        [ ! -e "$place/build/Makefile" ] || headers=yes
        [ ! -e "/boot/vmlinuz-$release" ] || image=yes
        [ "$release" != "$running" ] || active=yes
        echo "release $release modules=$modules headers=$headers image=$image running=$active"
    done
}

probe_nvidia_libraries() {
    for path in /usr/lib/*-linux-gnu/libnvidia-ml.so.* /usr/lib/*-linux-gnu/libcuda.so.* \
        /usr/lib/*-linux-gnu/nvidia/*/libnvidia-ml.so.* /usr/lib/*-linux-gnu/nvidia/*/libcuda.so.* \
        /usr/lib64/libnvidia-ml.so.* /usr/lib64/libcuda.so.* /usr/lib/libnvidia-ml.so.* /usr/lib/libcuda.so.* \
        /lib/*-linux-gnu/libnvidia-ml.so.* /lib/*-linux-gnu/libcuda.so.*; do
        [ ! -e "$path" ] || printf '%s\n' "$path"
    done | sort -u
}

probe_nvidia_devices() {
    for path in /dev/nvidia*; do
        if [ -e "$path" ] && [ "$path" != /dev/nvidia-caps ]; then printf '%s\n' "$path"; fi
    done
}

probe_dpkg() {
    command -v dpkg-query >/dev/null 2>&1 || not_here "dpkg-query: command not found"
    # shellcheck disable=SC2016  # dpkg-query fills in its own variables
    brief dpkg-query -W -f='${db:Status-Abbrev}\t${Package}\t${Version}\n' |
        grep -E 'nvidia|cuda|nccl|dkms|linux-image|linux-headers|pve-kernel|pve-headers|proxmox-(kernel|headers)'
    return 0
}

probe_services() {
    command -v systemctl >/dev/null 2>&1 || not_here "systemctl: command not found"
    brief systemctl list-units --all --plain --no-legend --no-pager 'peerlane-model@*' >"$work/units" 2>"$work/complaint" ||
        not_here "$(sed -n '$p' "$work/complaint")"
    while read -r unit _; do
        [ -n "$unit" ] || continue
        printf '# ==> unit %s <==\n' "$unit"
        brief systemctl show "$unit" -p ActiveState,SubState,NRestarts,ExecMainStartTimestamp,MainPID >"$work/shown"
        cat "$work/shown"
        pid=$(sed -n 's/^MainPID=//p' "$work/shown")
        if [ "${pid:-0}" != 0 ] && [ -r "/proc/$pid/environ" ]; then
            tr '\000' '\n' <"/proc/$pid/environ" | grep '^NCCL_' | sort | sed 's/^/Environment /'
        fi
    done <"$work/units"
}

probe_qm_pending() {
    command -v qm >/dev/null 2>&1 || not_here "qm: command not found"
    for path in /etc/pve/qemu-server/*.conf; do
        [ -e "$path" ] || continue
        vmid=${path##*/}
        vmid=${vmid%.conf}
        printf '# ==> qm pending %s <==\n' "$vmid"
        brief qm pending "$vmid"
    done
}

processes() {
    ticks=$(getconf CLK_TCK 2>/dev/null || echo 100)
    booted=$(sed -n 's/^btime //p' /proc/stat)
    for path in "$1"/*.pid; do
        [ -e "$path" ] || continue
        value_of "$path" || continue
        pid=$value
        case $pid in '' | *[!0-9]*) continue ;; esac
        [ -s "/proc/$pid/cmdline" ] || [ -n "$(tr '\000' ' ' 2>/dev/null <"/proc/$pid/cmdline")" ] || continue
        name=${path##*/}
        name=${name%.pid}
        told=
        since=$(sed 's/.*)//' "/proc/$pid/stat" | awk '{ print $20 }')
        [ -z "$since" ] || told="$told started $((booted + since / ticks))"
        if [ -e "$2/$name$3" ]; then told="$told changed $(stat -c %Y "$2/$name$3")"; fi
        cpus=$(awk '/^Cpus_allowed_list:/ { print $2 }' "/proc/$pid/status")
        [ -z "$cpus" ] || told="$told cpus $cpus"
        printf '# ==> vm %s pid %s%s <==\n' "$name" "$pid" "$told"
        tr '\000' '\n' <"/proc/$pid/cmdline" | grep -v '^$'
    done
    return 0
}

probe_qemu_processes() { processes /run/qemu-server /etc/pve/qemu-server .conf; }

probe_libvirt_processes() { processes /run/libvirt/qemu /etc/libvirt/qemu .xml; }

probe_net_cards() {
    [ -d /sys/class/net ] || not_here "/sys/class/net is not there"
    for place in /sys/class/net/*; do
        if [ -e "$place/device" ] && value_of "$place/address" && [ -n "$value" ]; then
            printf '%s %s\n' "${place##*/}" "$value"
        fi
    done
}

probe_cpu_time() { grep -E '^(cpu |btime )' /proc/stat; }

probe_memory() {
    for place in /sys/kernel/mm/hugepages/hugepages-*kB; do
        [ -d "$place" ] || continue
        size=${place##*/hugepages-}
        value_of "$place/nr_hugepages"
        total=$value
        value_of "$place/free_hugepages"
        echo "hugepages ${size%kB} total=$total free=$value"
    done
    for place in /sys/devices/system/node/node[0-9]*; do
        [ -d "$place" ] || continue
        total=$(awk '/MemTotal:/ { print $4 }' "$place/meminfo")
        value_of "$place/cpulist"
        echo "node ${place##*/node} cpus=$value mem_kib=$total"
    done
    value_of /sys/kernel/mm/transparent_hugepage/enabled && echo "transparent_hugepage: $value"
    value_of /sys/kernel/mm/ksm/run && echo "ksm_run: $value"
    value_of /sys/kernel/mm/ksm/pages_sharing && echo "ksm_pages_sharing: $value"
    value_of /sys/module/zfs/parameters/zfs_arc_max && echo "zfs_arc_max: $value"
    return 0
}

probe_rom_files() {
    [ -d /usr/share/kvm ] || not_here "/usr/share/kvm is not there"
    for path in /usr/share/kvm/*; do
        [ ! -f "$path" ] || printf '%s\n' "${path##*/}"
    done
}

probe_interrupts() {
    [ -r /proc/interrupts ] || not_here "/proc/interrupts: No such file or directory"
    awk '/^ *[0-9]+:/ {
            for (at = 2; at <= NF; at++) {
                if ($at ~ /^[0-9]+$/) continue
                if (!match($at, /^[A-Za-z][A-Za-z0-9_-]*/)) break
                chip = substr($at, 1, RLENGTH)
                sub(/-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]$/, "", chip)
                count[chip]++
                break
            }
        }
        END { for (chip in count) print chip, count[chip] }' /proc/interrupts | sort
}

probe_module_parameters() {
    [ -d /sys/module ] || not_here "/sys/module is not there"
    for path in /sys/module/vfio*/parameters/* /sys/module/iommufd/parameters/* /sys/module/pcie_aspm/parameters/*; do
        if value_of "$path" && [ -n "$value" ]; then
            module=${path%/parameters/*}
            printf '%s.%s %s\n' "${module##*/}" "${path##*/}" "$value"
        fi
    done
    return 0
}

probe_initramfs() {
    release=$(uname -r)
    image=
    for path in "/boot/initrd.img-$release" "/boot/initramfs-$release.img" "/boot/initrd-$release"; do
        if [ -z "$image" ] && [ -e "$path" ]; then image=$path; fi
    done
    [ -n "$image" ] || not_here "/boot/initrd.img-$release is not there"
    echo "image $image modified $(stat -c %Y "$image")"
    newest=
    changed=-1
    for path in /etc/modprobe.d/*.conf /etc/modules-load.d/*.conf /etc/initramfs-tools/modules; do
        if [ -r "$path" ] && grep -q vfio "$path" && [ "$(stat -c %Y "$path")" -gt "$changed" ]; then
            newest=$path
            changed=$(stat -c %Y "$path")
        fi
    done
    [ -n "$newest" ] || return 0
    echo "config $newest modified $changed"
    if command -v lsinitramfs >/dev/null 2>&1 && brief lsinitramfs "$image" >"$work/listed" 2>/dev/null; then
        echo "listed yes"
        sed -n -E 's#.*/((vfio|nouveau|nvidia|nova|snd[-_]hda|i2c[-_]nvidia|ucsi)[A-Za-z0-9_-]*)\.ko.*#\1#p' "$work/listed" |
            sort -u | sed 's/^/module /'
    fi
}

probe_start_logs() {
    for path in /var/log/pve/tasks/*/UPID:*:qmstart:*; do
        [ ! -e "$path" ] || printf '%s\n' "$path"
    done | awk -F: '{ print $7, $5, $0 }' | sort -k1,1n -k2,2r | awk '!seen[$1]++' >"$work/tasks"
    [ -s "$work/tasks" ] || not_here "no file matches /var/log/pve/tasks/*/UPID:*:qmstart:*"
    while read -r vmid at path; do
        [ -r "$path" ] || continue
        printf '# ==> vm %s task %s <==\n' "$vmid" "$((0x$at))"
        head -c 65536 "$path"
        [ -z "$(tail -c 1 "$path")" ] || printf '\n'
    done <"$work/tasks"
}

probe_qemu_binaries() {
    for path in /run/qemu-server/*.pid; do
        value_of "$path" || continue
        target=$(readlink "/proc/$value/exe") || continue
        replaced=no
        case $target in *' (deleted)') replaced=yes ;; esac
        name=${path##*/}
        echo "vm ${name%.pid} pid $value replaced=$replaced"
    done
    return 0
}

probe_nccl_files() {
    for path in /home/*/.nccl.conf /root/.nccl.conf; do
        if [ -r "$path" ] && grep -q '^[[:space:]]*NCCL_' "$path"; then
            printf '# ==> %s <==\n' "$path"
            grep '^[[:space:]]*NCCL_' "$path"
        fi
    done >"$work/found"
    [ -s "$work/found" ] || not_here "no user has a .nccl.conf"
    cat "$work/found"
}

# --- all sources, in the order of evidence_sources.py

# @SOURCES@

# --- the manifest, and the archive

privileged=false
[ "$(id -u)" != 0 ] || privileged=true
{
    printf '{\n "schema": "@SCHEMA@",\n "host": %s,\n' "$(json_word "$host")"
    printf ' "collected_at": "%s",\n "privileged": %s,\n "evidence": [\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$privileged"
    cat "$work/rows"
    printf '\n ]\n}\n'
} >"$folder/manifest.json"
say "collect.sh: the snapshot is in $folder; judge it with: peerlane audit --from $folder"
if [ "$pack" = yes ]; then
    tar -czf "$folder.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")" || exit 2
    say "collect.sh: and packed in $folder.tar.gz"
fi
