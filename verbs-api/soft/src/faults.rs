//! Faults that a user asks for: before each port of a device, and of the device itself.

mod device;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use rocinante_netdev::fault::{Plan, Word, name_of};
use rocinante_netdev::{AnyPort, PathSpec, Port as _};
use rocinante_stack::wire::Opcode;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};

pub(super) use self::device::fail;
pub use self::device::{DeviceFaults, Verb};
use crate::model::error::VerbsError;
use crate::provider::random;

/// The environment variable with the faults of a device, if the program does not set them: see
/// `OpenOptions::fault`.
pub const FAULT_VARIABLE: &str = "ROCINANTE_FAULT";

/// The environment variable that names the file for the decisions about faults, if the program
/// does not: see `OpenOptions::fault_log`.
pub const FAULT_LOG_VARIABLE: &str = "ROCINANTE_FAULT_LOG";

/// The shortest packet: a BTH and an ICRC.
const PACKET_MIN: usize = 16;

/// A program's choice of faults. The environment decides the fields that it leaves open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultWish {
    pub words: Option<String>,
    pub log: Option<PathBuf>,
}

/// Faults as they were settled.
#[derive(Debug)]
pub(super) struct Chosen {
    plan: Plan,
    log: Option<PathBuf>,
}

impl FaultWish {
    /// The faults of a new device, or `None` if there are none. Error: they make no sense.
    pub(super) fn settle(&self) -> Result<Option<Chosen>, VerbsError> {
        self.settle_with(|name| std::env::var_os(name))
    }

    fn settle_with(
        &self,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Chosen>, VerbsError> {
        let variable = |name| variable(name).filter(|value| !value.is_empty());
        let (source, words) = match (&self.words, variable(FAULT_VARIABLE)) {
            (Some(words), _) => ("fault", words.clone()),
            (None, Some(words)) => (FAULT_VARIABLE, words.to_string_lossy().into_owned()),
            (None, None) => return Ok(None),
        };
        let plan = plan(&words).map_err(|why| VerbsError::Invalid(format!("{source}: {why}")))?;
        let log = self.log.clone().or_else(|| variable(FAULT_LOG_VARIABLE).map(PathBuf::from));
        Ok((!plan.is_harmless()).then_some(Chosen { plan, log }))
    }
}

/// Reads faults: words, or the path of a schedule. Error: a line that says what to change.
pub fn plan(text: &str) -> Result<Plan, String> {
    Plan::read(text, names)
}

/// Reads the text of a schedule. Error: as [`plan`].
pub fn schedule(text: &str) -> Result<Plan, String> {
    Plan::of_schedule(text, names)
}

/// The numbers of a word of a plan.
pub fn names(kind: Word, text: &str) -> Vec<u8> {
    fn all(found: impl Iterator<Item = (usize, bool)>) -> Vec<u8> {
        found.filter(|(_, is)| *is).map(|(number, _)| number as u8).collect()
    }
    let plain = text.strip_prefix("ibv_").unwrap_or(text);
    match kind {
        Word::Opcode => opcodes(text),
        Word::Verb => {
            all(device::VERBS.iter().map(|(verb, name)| (*verb as usize, *name == plain)))
        }
        Word::Completion => {
            let has = has_words(text);
            all(device::KINDS.iter().map(|kind| has(kind.name())).enumerate())
        }
        Word::Status => {
            let plain = text.strip_prefix("IBV_WC_").unwrap_or(text);
            all(device::STATUSES.iter().map(|status| status.name() == plain).enumerate())
        }
    }
}

/// Whether a name has these words: `acknowledge`, `rdma-write`, `RC_SEND_ONLY`.
fn has_words(words: &str) -> impl Fn(&str) -> bool {
    let words = format!("_{}_", words.to_ascii_uppercase().replace('-', "_"));
    move |name| words.len() > 2 && format!("_{name}_").contains(&words)
}

/// The opcodes whose names have these words.
fn opcodes(words: &str) -> Vec<u8> {
    let has = has_words(words);
    Opcode::all().filter(|info| has(info.name)).map(|info| info.opcode.0).collect()
}

/// The ports of a new device, and its faults.
pub(super) struct Met {
    pub(super) ports: Vec<AnyPort>,
    /// The reason for the backend, with the faults.
    pub(super) why: String,
    pub(super) of_device: Option<Arc<DeviceFaults>>,
}

impl Chosen {
    /// Puts the faults before the ports, and adds their words and their seed to `why`. Error: no
    /// descriptor is left, or the log cannot be written.
    pub(super) fn before(self, ports: Vec<AnyPort>, mut why: String) -> Result<Met, VerbsError> {
        let Self { plan, log } = self;
        let seed = match plan.seed {
            Some(seed) => seed,
            // Of ten digits at most, as users type it again.
            None => u64::from(random::random()?),
        };
        let refused = |error: std::io::Error| {
            let file = log.as_ref().map(|log| format!(" in {}", log.display()));
            VerbsError::Io(std::io::Error::new(
                error.kind(),
                format!("the faults{}: {error}", file.unwrap_or_default()),
            ))
        };
        let device = name_of(ports.first().map_or(&[], |port| port.addresses()));
        let of_device = DeviceFaults::new((&plan, seed), device, log.as_deref());
        let with = |(nth, port): (usize, AnyPort)| match plan.is_harmless_to_datagrams() {
            true => Ok(port),
            false => port.with_faults((&plan, seed), nth, log.as_deref(), seal).map_err(refused),
        };
        let of_device = of_device.map_err(refused)?;
        let ports = ports.into_iter().enumerate().map(with).collect::<Result<_, _>>()?;
        why += &format!("{plan}, seed {seed}");
        Ok(Met { ports, why, of_device })
    }
}

fn seal(spec: &PathSpec, src_port: u16, id: u16, packet: &mut [u8]) {
    let Some(ip) = IpFields::between(spec.local, spec.remote) else { return };
    let mut template = Template::new(&ip, src_port);
    template.set_id(id, DF);
    if packet.len() >= PACKET_MIN {
        template.seal(packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_has_the_last_word() {
        let settled = |words: Option<&str>, variable: Option<&str>| {
            let wish = FaultWish { words: words.map(str::to_owned), log: None };
            let value = |name: &str| match name {
                FAULT_VARIABLE => variable.map(OsString::from),
                _ => Some(OsString::from("/a/log")),
            };
            wish.settle_with(value).map(|chosen| {
                let Chosen { plan, log } = chosen?;
                assert_eq!(log, Some("/a/log".into()));
                Some(plan.to_string())
            })
        };
        for (words, variable, found) in [
            (None, None, None),
            (None, Some(""), None),
            (None, Some("loss=1%"), Some("loss=1%")),
            (Some("dup=1%"), Some("loss=1%"), Some("dup=1%")),
            (Some("dup=1%"), Some("nonsense"), Some("dup=1%")),
            (Some("off"), Some("loss=1%"), None),
            (Some("loss=0"), None, None),
        ] {
            let found = found.map(str::to_owned);
            assert_eq!(settled(words, variable).unwrap(), found, "{words:?} {variable:?}");
        }
        let error = settled(None, Some("lost=1%")).unwrap_err().to_string();
        assert!(error.contains("ROCINANTE_FAULT: \"lost\" is no word"), "{error}");
        let error = settled(Some("loss=2"), None).unwrap_err().to_string();
        assert!(error.contains("fault: loss=2: a chance"), "{error}");
    }

    #[test]
    fn words_name_the_opcodes_that_have_them() {
        assert_eq!(opcodes("acknowledge"), [0x11, 0x12]);
        assert_eq!(opcodes("rc-acknowledge"), [0x11]);
        assert_eq!(opcodes("RC_SEND_ONLY_WITH_IMMEDIATE"), [5]);
        assert_eq!(opcodes("cnp"), [0x81]);
        assert_eq!(opcodes("rdma-read-response").len(), 4);
        for none in ["", "-", "acknow", "sen", "é"] {
            assert!(opcodes(none).is_empty(), "{none:?}");
        }
    }

    #[test]
    fn a_packet_is_sealed_as_its_shard_seals_it() {
        let [local, remote] = [1, 2].map(|last| std::net::IpAddr::from([10, 0, 0, last]));
        let spec = PathSpec { local, remote, src_port: 1, tos: 0, ttl: 64, flow_label: 0 };
        let mut packet = [7; 60];
        seal(&spec, 0xc123, 77, &mut packet);
        let mut template = Template::new(&IpFields::between(local, remote).unwrap(), 0xc123);
        template.set_id(77, DF);
        assert_eq!(packet[56..], template.of(&packet).to_le_bytes());
        template.set_id(78, DF);
        assert_ne!(packet[56..], template.of(&packet).to_le_bytes());
        // No shard makes such a packet.
        seal(&spec, 0xc123, 77, &mut [0; 3]);
    }
}
