//! Settings that the library cannot follow: each is named in one line, at any level of the log,
//! because programs show an errno at most.

use std::process::Stdio;

use rocinante_lab::{LabConfig, Pair};
use rocinante_tests::capi::Library;
use rocinante_tests::running::{Done, Running};
use rocinante_tests::{need, require};

/// Runs `opens.py` as an ordinary user with these variables and no others.
fn opened(library: &Library, pair: &Pair, variables: &[(&str, &str)]) -> Done {
    let mut command = library.command(&library.script("opens.py"));
    command.env_remove("ROCINANTE_LOG").env("ROCINANTE_AGENT", "off").envs(variables.to_vec());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::of(pair.containers()[0].spawn(&mut command).unwrap()).finish().succeeded()
}

#[test]
fn an_invalid_setting_is_named_in_one_line() {
    require!(need::lab());
    require!(need::program("python3"));
    let (library, pair) = (Library::new(), Pair::new(&LabConfig::default()).unwrap());
    let unwritable = ("ROCINANTE_FAULT_LOG", "/nowhere/log");
    for (variables, words, outcome) in [
        (&[][..], "", "nothing 0"),
        (
            &[("ROCINANTE_LOG", "loud")],
            "ROCINANTE_LOG=loud: give it off, warn, info or debug, and after a comma a file",
            "nothing 0",
        ),
        (
            &[("ROCINANTE_LOG", "warn,/nowhere/log")],
            "ROCINANTE_LOG: /nowhere/log: No such file or directory",
            "nothing 0",
        ),
        (&[("ROCINANTE_COUNTERS", "yes")], "ROCINANTE_COUNTERS=yes: give it 1 or 0", "nothing 0"),
        (
            &[("ROCINANTE_DEVICES", "nosuch0")],
            "ROCINANTE_DEVICES: no interface \"nosuch0\": there are",
            "ibv_get_device_list ENOSYS",
        ),
        (&[("ROCINANTE_NETDEV", "pigeon")], "ROCINANTE_NETDEV: ", "ibv_open_device EINVAL"),
        (&[("ROCINANTE_SHARDS", "0")], "1 to 64 shards", "ibv_open_device EINVAL"),
        (&[("ROCINANTE_KEEP_ALIVE", "on")], "give it seconds", "ibv_open_device EINVAL"),
        (&[("ROCINANTE_AGENT", "OFF")], "the path of a socket, or `off`", "ibv_open_device EINVAL"),
        (&[("ROCINANTE_FAULT", "lost=1%")], "\"lost\" is no word", "ibv_open_device EINVAL"),
        (
            &[("ROCINANTE_FAULT", "loss=0.01%"), unwritable],
            "the faults in /nowhere/log: No such file",
            "ibv_alloc_pd EIO",
        ),
        // A backend that is named and that this user may not open.
        (&[("ROCINANTE_NETDEV", "packet")], "packet: ", "ibv_alloc_pd EPERM"),
        (&[("ROCINANTE_NETDEV", "afxdp")], "afxdp: ", "ibv_alloc_pd EPERM"),
    ] {
        let Done { out, err, .. } = opened(&library, &pair, variables);
        assert_eq!(out, format!("{outcome}\n"), "{variables:?}: {err}");
        assert_eq!(err.lines().count(), usize::from(!words.is_empty()), "{variables:?}: {err}");
        assert!(err.contains(words), "{variables:?}: no {words:?} in {err}");
    }
}
