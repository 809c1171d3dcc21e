//! A port on a tap device with a descriptor of the test as its other end.
#![allow(unsafe_code)]

use super::*;
use crate::port::headers::FrameTemplate;
use crate::testing::ReceiveBy as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

const TAP_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 2];

/// Makes the tap device `v0` in the calling thread's namespace.
fn make_tap() -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    (request.ifr_name[0], request.ifr_name[1]) = (b'v'.cast_signed(), b'0'.cast_signed());
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

fn open(mtu: u32) -> Result<(NetNs, File, XdpPort), String> {
    let ns = NetNs::new().map_err(|e| e.to_string())?;
    let tap = ns.run(make_tap).map_err(|e| format!("no tap device: {e}"))?;
    ns.sh(&format!(
        "ip link set v0 address 02:00:00:00:0a:01 mtu {mtu} up
         ip address add 10.9.0.1/24 dev v0
         ip address add fd09::1/64 dev v0 nodad
         ip neigh add 10.9.0.2 lladdr 02:00:00:00:0a:02 dev v0 nud permanent
         ip neigh add fd09::2 lladdr 02:00:00:00:0a:02 dev v0 nud permanent"
    ));
    let port = open_in(&ns, &PortConfig::default()).map_err(|e| e.to_string())?;
    Ok((ns, tap, port))
}

/// The next RoCE frame that leaves through the tap.
fn next_frame(tap: &mut File) -> Vec<u8> {
    let end = Instant::now() + PATIENCE;
    let mut buffer = vec![0; 16 << 10];
    loop {
        match tap.read(&mut buffer) {
            Ok(len) if parse_frame(&buffer[..len]).is_some() => return buffer[..len].to_vec(),
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
        }
        assert!(Instant::now() < end, "nothing leaves");
    }
}

fn both_ways(mtu: u32, sizes: &[usize]) -> Result<(), String> {
    let (ns, mut tap, mut port) = open(mtu)?;
    for v6 in [false, true] {
        let path = ns.run(|| port.add_path(&spec(v6, true))).unwrap().id;
        let peer = FrameTemplate::new(PEER_MAC, TAP_MAC, &spec(v6, false), 0xc0de).unwrap();
        for &len in sizes {
            let payload = pattern(len, len as u32);
            send(&mut port, path, &payload);
            let frame = next_frame(&mut tap);
            assert!(parse_frame(&frame).unwrap().payload == payload, "mtu {mtu} v6 {v6} {len}");
            assert_eq!(&frame[..12], [PEER_MAC, TAP_MAC].concat());

            let mut frame = vec![0; peer.header_len() + len];
            peer.write(&mut frame, len, 9);
            frame[peer.header_len()..].copy_from_slice(&payload);
            assert_eq!(tap.write(&frame).unwrap(), frame.len());
            let got = receive(&mut port, 1);
            assert!(got.len() == 1 && got[0].payload == payload, "mtu {mtu} v6 {v6} {len}");
        }
    }
    assert_eq!(port.stats().rx_queue_drops, 0);
    Ok(())
}

#[test]
fn a_tap_works_at_mtu_1500() {
    or_skip!(both_ways(1500, &[16, 64, 1024, 1452]));
}

#[test]
fn a_tap_works_at_path_mtu_4096() {
    or_skip!(both_ways(4200, &[16, 1024, 3800, 4112]));
}

/// Frames with false lengths pass the program, which checks addresses and ports only.
#[test]
fn malformed_datagrams_are_counted_and_their_chunks_come_back() {
    let (_ns, mut tap, mut port) = or_skip!(open(4200));
    let peer = FrameTemplate::new(PEER_MAC, TAP_MAC, &spec(false, false), 0xc0de).unwrap();
    let mut frame = vec![0; peer.header_len() + 4112];
    peer.write(&mut frame, 4112, 9);
    let good = frame.clone();
    frame[38..40].copy_from_slice(&[0xff, 0xff]);
    for round in 0..1000 {
        assert_eq!(tap.write(&frame).unwrap(), frame.len());
        assert!(receive_none_up(&mut port), "round {round}");
    }
    assert_eq!(tap.write(&good).unwrap(), good.len());
    assert_eq!(receive(&mut port, 1).len(), 1);
    let stats = port.stats();
    assert_eq!((stats.rx_malformed, stats.rx_datagrams, stats.rx_queue_drops), (1000, 1, 0));
}

/// Reads one frame, which the port must not hand up.
fn receive_none_up(port: &mut XdpPort) -> bool {
    port.receive_by(64, &mut |d| panic!("{d:?}")).unwrap() == 1
}
