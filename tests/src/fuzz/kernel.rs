//! Unexpected input from the kernel: netlink datagrams, and control messages of sockets.

use rocinante_netdev::fuzzing;

pub(super) fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 2 {
        0 => fuzzing::netlink(rest),
        _ => fuzzing::control(rest),
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let attribute = |kind: u16, value: &[u8]| {
        let len = 4 + value.len() as u16;
        let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    let message = |kind: u16, body: &[u8]| {
        let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&[0; 10]);
        bytes.extend_from_slice(body);
        bytes.insert(0, 0);
        bytes
    };
    let route =
        [&[2, 32, 0, 0, 254, 0, 0, 1, 0, 0, 0, 0][..], &attribute(4, &[3, 0, 0, 0])].concat();
    let neighbour = [&[2, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 1][..], &attribute(2, &[2, 0, 0, 0, 0, 1])];
    let via = attribute(18, &[2, 0, 10, 0, 0, 1]);
    let metrics = attribute(8, &attribute(2, &1400u32.to_ne_bytes()));
    let compare =
        [attribute(1, b"cmp\0"), attribute(2, &attribute(3, &attribute(1, &[17])))].concat();
    let expressions = attribute(4, &attribute(1, &compare));
    let names = [attribute(1, b"filter\0"), attribute(2, b"input\0")].concat();
    let rule = [&[2, 0, 0, 0][..], &names, &attribute(3, &[0; 8]), &expressions].concat();
    let control = |level: i32, kind: i32, value: &[u8; 8]| {
        let size = 20u64.to_ne_bytes();
        [&[1][..], &size, &level.to_ne_bytes(), &kind.to_ne_bytes(), value].concat()
    };
    vec![
        message(24, &[&route[..], &via, &metrics].concat()),
        message(28, &neighbour.concat()),
        message(
            16,
            &[&[0; 16][..], &attribute(3, b"veth0\0"), &attribute(4, &[0xdc, 5, 0, 0])].concat(),
        ),
        message(20, &[&[2, 24, 0, 0, 3, 0, 0, 0][..], &attribute(1, &[10, 0, 0, 1])].concat()),
        message(36, &[&[0; 20][..], &attribute(1, b"netem\0")].concat()),
        message(0x0a06, &rule),
        message(2, &(-19i32).to_ne_bytes()),
        control(17, 104, &[0, 4, 0, 0, 0, 0, 0, 0]),
        [control(0, 1, &[3, 0, 0, 0, 0, 0, 0, 0]), control(41, 67, &[3, 0, 0, 0, 0, 0, 0, 0])]
            .concat(),
    ]
}
