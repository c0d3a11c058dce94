# Set-up shared by script/demo and script/test; sourced by them, from the clone's root.
#
#   setup_java        Java 17 or newer, by the system's packages where it is missing
#   setup_libraries   what MariaDB's own build needs of the system
#   setup_venv EXTRA  .venv with the project and its extra ("" or "dev"), only when it changed
#   setup_classes     an archive of the classes that Kafka loads: halves the CPU time of a start
#
# $PYTHON names the Python to use (3.11 or newer). Everything is said on stderr. Exit status 3:
# something is missing that may not be installed from here; the message says what to do.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

fail() {
  say "$1"
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 3
}

# --- the system's packages

can_install() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || [ "$(uname)" = Darwin ]; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

package_tool() {
  local tool
  for tool in apt-get dnf apk brew; do
    if command -v "$tool" >/dev/null; then
      echo "$tool"
      return
    fi
  done
}

# first_known NAME...: the first of the packages that the system's lists have
first_known() {
  local tool name
  tool=$(package_tool)
  for name in "$@"; do
    case $tool in
      apt-get) apt-cache policy "$name" 2>/dev/null | grep 'Candidate: [^(]' >/dev/null ;;
      dnf) dnf -q list "$name" >/dev/null 2>&1 ;;
      apk) [ -n "$(apk search -x "$name" 2>/dev/null)" ] ;;
      brew) brew info "$name" >/dev/null 2>&1 ;;
      *) false ;;
    esac || continue
    echo "$name"
    return
  done
  return 1
}

# by_hand NAME...: the command with which a person installs the first of them
by_hand() {
  local tool name
  tool=$(package_tool)
  name=$(first_known "$@" || echo "$1")
  case $tool in
    apk) echo "sudo apk add $name" ;;
    brew) echo "brew install $name" ;;
    *) echo "sudo ${tool:-"(your package tool)"} install $name" ;;
  esac
}

# install_first NAME...: installs the first of the packages that there is
install_first() {
  local tool name
  tool=$(package_tool)
  if [ "$tool" = apt-get ]; then as_root apt-get update -qq >&2 || return 1; fi
  name=$(first_known "$@") || return 1
  say "installing $name by $tool"
  case $tool in
    apt-get) as_root env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "$name" >&2 ;;
    dnf) as_root dnf install -y -q "$name" >&2 ;;
    apk) as_root apk add -q "$name" >&2 ;;
    brew) brew install -q "$name" >&2 ;;
  esac
}

# --- Java

java_version() { # of the java in $1; empty where it does not run
  "$1" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9][0-9]*\).*/\2/p' | head -1
}

find_java() {
  local java version
  for java in ${JAVA_HOME:+"$JAVA_HOME/bin/java"} "$(command -v java || true)" \
    /usr/lib/jvm/*/bin/java /opt/homebrew/opt/openjdk*/bin/java /usr/local/opt/openjdk*/bin/java \
    /Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java; do
    [ -x "$java" ] || continue
    version=$(java_version "$java")
    if [ -n "$version" ] && [ "$version" -ge 17 ]; then
      if [ "$java" != "$(command -v java || true)" ]; then
        JAVA_HOME=${java%/bin/java}
        export JAVA_HOME
        say "using the Java $version in $JAVA_HOME"
      fi
      return 0
    fi
  done
  return 1
}

setup_java() {
  find_java && return
  local tool names
  tool=$(package_tool)
  case $tool in
    apt-get) names="openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless" ;;
    dnf) names="java-17-openjdk-headless java-21-openjdk-headless java-latest-openjdk-headless" ;;
    apk) names="openjdk17-jre-headless openjdk21-jre-headless" ;;
    brew) names="openjdk@17 openjdk@21" ;;
    *) fail "Java 17 or newer is needed, and no package tool that is known was found" \
      "install one and set JAVA_HOME to its folder" ;;
  esac
  say "no Java 17 or newer was found"
  local otherwise="or set JAVA_HOME to the folder of a Java 17 or newer"
  # shellcheck disable=SC2086  # a list of names
  can_install || fail "installing it needs root, or sudo without a password; please run" \
    "$(by_hand $names)" "$otherwise"
  # shellcheck disable=SC2086
  install_first $names || fail "it could not be installed; please run" \
    "$(by_hand $names)" "$otherwise"
  find_java || fail "the Java that was installed is not found; set JAVA_HOME to its folder"
}

# --- libraries

setup_libraries() {
  [ "$(uname -s)" = Linux ] || return 0
  local missing name
  missing=$("$(venv_python)" - <<'PYTHON'
import ctypes, platform
if platform.libc_ver()[0] == "glibc":
    for name in ("libcrypt.so.1", "libsystemd.so.0", "libstdc++.so.6"):
        try:
            ctypes.CDLL(name)
        except OSError:
            print(name)
PYTHON
  )
  for name in $missing; do
    say "MariaDB needs $name, which is missing"
    case $(package_tool):$name in
      apt-get:libcrypt*) name=libcrypt1 ;;
      apt-get:libsystemd*) name=libsystemd0 ;;
      apt-get:libstdc*) name=libstdc++6 ;;
      dnf:libcrypt*) name=libxcrypt-compat ;;
      dnf:libsystemd*) name=systemd-libs ;;
      dnf:libstdc*) name=libstdc++ ;;
    esac
    { can_install && install_first "$name"; } || fail "please run" "$(by_hand "$name")" \
      "(the demo and some tests need it; the publisher itself does not)"
  done
}

# --- Python

venv_python() { echo .venv/bin/python; }

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local python
  for python in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if command -v "$python" >/dev/null && new_enough "$python"; then
      command -v "$python"
      return
    fi
  done
  return 1
}

setup_venv() {
  local extra=$1 python stamp inside
  # a virtual environment does not survive being moved, nor another Python
  stamp="$(cksum <pyproject.toml) $PWD"
  inside=.venv/.installed-with
  for done_for in "$inside-$extra" "$inside-dev"; do
    if [ -f "$done_for" ] && [ "$(cat "$done_for")" = "$stamp" ] && new_enough "$(venv_python)"; then
      return
    fi
  done
  python=$(find_python) || fail "Python 3.11 or newer is needed" \
    "install one, or name it: PYTHON=/path/to/python3.12 $0"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    say "this Python has no module venv"
    { can_install && install_first "$(basename "$python")-venv" python3-venv; } ||
      fail "please run" "$(by_hand "$(basename "$python")-venv" python3-venv)"
  fi
  if ! { [ -x "$(venv_python)" ] && new_enough "$(venv_python)" && [ "$(cat .venv/.at 2>/dev/null)" = "$PWD" ]; }; then
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    echo "$PWD" >.venv/.at
  fi
  rm -f "$inside"-*
  say "installing the project and what it needs into .venv (some 500 MB; minutes, the first time)"
  "$(venv_python)" -m pip install --quiet --disable-pip-version-check \
    --editable ".${extra:+[$extra]}" >&2 || fail "pip could not install the project (see above)" \
    "check the network connection; behind a proxy set https_proxy"
  echo "$stamp" >"$inside-$extra"
}

# --- Kafka's classes

setup_classes() {
  "$(venv_python)" -m tests.servers.kafka || say "that failed; the tests only take longer"
}
