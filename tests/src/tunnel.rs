//! WireGuard by a program in user space, over a TUN device: RDMA that travels encrypted, without a
//! module of the kernel.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

use rocinante_lab::{ChildGuard, Lab};

use crate::need;
use crate::setup::Family;

/// UDP port of the encrypted datagrams.
pub const PORT: u16 = 51820;
/// Bytes that WireGuard adds to a packet over IPv4, and some more.
const OVERHEAD: u32 = 80;
/// The programs that can do it, their options, and how the device is to be made for them.
const PROGRAMS: [(&str, &str, &str); 2] = [
    ("boringtun-cli", "--disable-drop-privileges --disable-multi-queue", "multi_queue"),
    ("wireguard-go", "", ""),
];

/// Makes the device and its addresses, says so, and becomes the program. The device is there with
/// its MTU before, because boringtun reads that once; wireguard-go sets another one. The control
/// socket lies in a `/run` of its own. The program ends with the process that started it.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs none /run
mkdir /run/wireguard
printf %s "$KEY" >/run/key
ip link delete wg0 2>/dev/null || true
ip tuntap add dev wg0 mode tun $KIND
ip link set wg0 mtu "$MTU"
(
    tries=0
    until wg set wg0 private-key /run/key listen-port "$PORT" peer "$PEER_KEY" \
        allowed-ips "$PEER_ADDRESSES" endpoint "$PEER:$PORT" 2>/dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || exit 1
        sleep 0.05
    done
    ip address add "$ADDRESS" dev wg0
    ip address add "$ADDRESS6" dev wg0 nodad
    ip link set wg0 mtu "$MTU" up
    echo ready
) &
exec 3<&0
(cat <&3; kill $$) >/dev/null 2>&1 &
exec $PROGRAM >/dev/null 2>&1
"#;

/// The device at the first or second end of an encrypted link.
#[must_use]
pub fn address(index: usize, family: Family) -> IpAddr {
    let host = index as u8 + 1;
    match family {
        Family::V4 => Ipv4Addr::new(10, 7, 0, host).into(),
        Family::V6 => Ipv6Addr::new(0xfd07, 0, 0, 0, 0, 0, 0, host.into()).into(),
    }
}

/// The requirements of encrypted links. Error: the reason why there are none.
pub fn available() -> Result<(), String> {
    need::machine_root()?;
    need::nft()?;
    need::program("wg")?;
    need::program("unshare")?;
    program().ok_or("needs wireguard-go or boringtun-cli (apt install wireguard-go)")?;
    if Path::new("/dev/net/tun").exists() { Ok(()) } else { Err("needs /dev/net/tun".into()) }
}

/// A command, and how the device is to be made for it.
fn program() -> Option<(String, &'static str)> {
    let found = PROGRAMS.iter().find(|(name, ..)| need::program(name).is_ok());
    found.map(|(name, options, kind)| (format!("{name} {options} -f wg0"), *kind))
}

/// Joins the first two containers of a lab by an encrypted link whose packets fit `underlay`, an
/// MTU in bytes. Panics if it cannot be made: ask [`available`] first.
#[must_use]
pub fn join(lab: &Lab, underlay: u32) -> [ChildGuard; 2] {
    let (program, kind) = program().expect("the caller asked");
    let keys = [0, 1].map(|_| wg("genkey", ""));
    [0, 1].map(|own| {
        let peer = 1 - own;
        let of = |index, family| address(index, family).to_string();
        let [v4, v6] = [Family::V4, Family::V6].map(|family| of(peer, family));
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", SCRIPT])
            .env("PROGRAM", &program)
            .env("KIND", kind)
            .env("KEY", &keys[own])
            .env("PEER_KEY", wg("pubkey", &keys[peer]))
            .env("ADDRESS", of(own, Family::V4) + "/24")
            .env("ADDRESS6", of(own, Family::V6) + "/64")
            .env("PEER_ADDRESSES", format!("{v4}/32,{v6}/128"))
            .env("PEER", lab.container(peer).ipv4().to_string())
            .env("PORT", PORT.to_string())
            .env("MTU", (underlay - OVERHEAD).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        for _ in 0..3 {
            let mut program = lab.container(own).spawn(&mut command).expect("unshare");
            let stdout = program.child_mut().stdout.take().expect("a pipe");
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).expect("a line");
            if line == "ready\n" {
                return program;
            }
            eprintln!("the tunnel's program is not ready: it is started again");
        }
        panic!("{command:?}");
    })
}

fn wg(what: &str, stdin: &str) -> String {
    let mut command = Command::new("wg");
    let mut child =
        ChildGuard::spawn(command.arg(what).stdin(Stdio::piped()).stdout(Stdio::piped()))
            .expect("wg");
    let mut pipe = child.child_mut().stdin.take().expect("a pipe");
    pipe.write_all(stdin.as_bytes()).expect("wg reads");
    drop(pipe);
    let output = child.wait_with_output(crate::harness::PATIENCE).expect("wg ends");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}
