//! The commands of `rocinante` inside the guest, with the kernel's device at both ends.

use crate::guest::Guest;
use crate::matrix::Step;

/// TCP port on which two sides find each other.
const PORT: u16 = 18_600;

/// A command with two sides, or with one.
pub struct Program {
    /// Its name.
    pub(super) name: &'static str,
    command: &'static str,
    /// Options of the client; `None` if there is but one side.
    client: Option<&'static str>,
    /// What the only side, or the client, must say.
    says: &'static [&'static str],
}

const fn two(name: &'static str, command: &'static str, client: &'static str) -> Program {
    Program { name, command, client: Some(client), says: &[] }
}

/// All of them.
pub(super) static PROGRAMS: [Program; 9] = [
    Program {
        name: "devices",
        command: "devices",
        client: None,
        says: &["hca_id: rxe0", "PORT_ACTIVE, Ethernet", "GID[", "active path mtu:  4096"],
    },
    two("pingpong", "pingpong -c", "-n 100"),
    two("pingpong_events", "pingpong -c -e", "-n 100"),
    two("write_bw", "perf write-bw", "-n 200 -s 8192 -q 2"),
    two("read_bw", "perf read-bw", "-n 200 -s 8192 -q 2"),
    two("send_bw", "perf send-bw", "-n 200 -s 64 -l 8 -Q 8"),
    two("write_lat", "perf write-lat", "-n 50"),
    two("send_lat", "perf send-lat", "-n 50"),
    two("atomic_lat", "perf atomic-lat", "-n 50"),
];

impl Program {
    pub(super) fn run(&self, guest: &Guest, device: &str, address: &str) -> Step {
        let program = format!("/host/rocinante-guest rocinante {}", self.command);
        let Some(client) = self.client else {
            return self.check(&read(guest, &program)?);
        };
        // The agent has the usual port.
        let side = format!("{program} --device {device} --bind {address} -p {PORT}");
        let server = guest.start(&side, super::PATIENCE).map_err(|error| error.to_string())?;
        let said = read(guest, &format!("{side} {address} {client}"));
        let served = match &said {
            Ok(_) => server.wait(),
            Err(_) => server.kill(),
        };
        let served = served.map_err(|error| error.to_string())?;
        let said = said.map_err(|why| format!("{why}; the server: {}", served.stderr))?;
        if served.code != 0 {
            return Err(format!("the server ended with {}: {}", served.code, served.stderr));
        }
        self.check(&said)
    }

    fn check(&self, said: &str) -> Step {
        match self.says.iter().find(|part| !said.contains(*part)) {
            None if said.is_empty() => Err("it said nothing".into()),
            None => Ok(()),
            Some(part) => Err(format!("{part:?} is not in {said:?}")),
        }
    }
}

fn read(guest: &Guest, command: &str) -> Step<String> {
    guest.read(command, super::PATIENCE).map_err(|error| error.to_string())
}
