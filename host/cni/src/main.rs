//! `rocinante-cni`: a plugin for the end of a chain of CNI plugins (CNI specification 1.1.0). It
//! changes nothing of a network. It has the agent of this host know each interface before the
//! container runs: from then on only the addresses that the engine gave it leave there, also if the
//! container may change them.
//!
//! Keys of its configuration: `control`, the path of the agent's control socket; `required`
//! (true), whether a container that the agent does not serve is to fail; `class`, the name of the
//! container's class in the agent's configuration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rocinante_agent::AgentError;
use rocinante_agent::control::{self, About};

use rscni_plugin::cni::{Cni, Plugin};
use rscni_plugin::error::Error;
use rscni_plugin::types::{Args, CNIResult};

/// The code of the specification's free range for an interface that the agent does not serve.
const REFUSED: u32 = 100;

struct Chained;

/// The plugin's own keys.
struct Options {
    control: PathBuf,
    required: bool,
    class: Option<String>,
}

impl Options {
    fn of(args: &Args) -> Result<Self, Error> {
        let wrong =
            |key: &str, kind: &str| Error::InvalidNetworkConfig(format!("{key} is no {kind}"));
        let own = &args.config().custom;
        let control = match own.get("control") {
            None => control::DEFAULT.into(),
            Some(path) => path.as_str().ok_or_else(|| wrong("control", "string"))?.into(),
        };
        let required = match own.get("required") {
            None => true,
            Some(required) => required.as_bool().ok_or_else(|| wrong("required", "boolean"))?,
        };
        let class = match own.get("class") {
            None => None,
            Some(name) => Some(name.as_str().ok_or_else(|| wrong("class", "string"))?.to_owned()),
        };
        Ok(Self { control, required, class })
    }
}

/// The container of an operation, for the agent.
fn about(args: &Args, options: &Options) -> Result<About, Error> {
    let missing = |name: &str| Error::InvalidEnvValue(format!("{name} is missing"));
    Ok(About {
        namespace: args.netns().ok_or_else(|| missing("CNI_NETNS"))?.clone(),
        interface: Some(args.ifname().ok_or_else(|| missing("CNI_IFNAME"))?.to_string()),
        id: args.container_id().ok_or_else(|| missing("CNI_CONTAINERID"))?.to_string(),
        engine: "cni".to_owned(),
        class: options.class.clone(),
    })
}

fn refused(error: &AgentError) -> Error {
    Error::Custom(REFUSED, "The agent does not serve the interface".to_owned(), error.to_string())
}

fn no_agent(control: &Path) -> String {
    format!("no agent runs at {}", control.display())
}

impl Cni for Chained {
    fn add(&self, args: Args) -> Result<CNIResult, Error> {
        let options = Options::of(&args)?;
        let Some(before) = args.config().prev_result.clone() else {
            let reason = "prevResult is missing: the plugin stands behind one that makes a network";
            return Err(Error::InvalidNetworkConfig(reason.to_owned()));
        };
        let failed = match control::introduce(&options.control, &about(&args, &options)?) {
            Ok(Some(_)) => return Ok(before),
            Ok(None) => Error::TryAgainLater(no_agent(&options.control)),
            Err(error) => refused(&error),
        };
        if options.required {
            return Err(failed);
        }
        eprintln!("rocinante-cni: {failed}");
        Ok(before)
    }

    /// The rules go with the interface, which the plugins before take away.
    fn del(&self, _: Args) -> Result<(), Error> {
        Ok(())
    }

    fn check(&self, args: Args) -> Result<(), Error> {
        let options = Options::of(&args)?;
        match control::is_introduced(&options.control, &about(&args, &options)?) {
            Ok(Some(_)) => Ok(()),
            _ if !options.required => Ok(()),
            Ok(None) => Err(Error::TryAgainLater(no_agent(&options.control))),
            Err(error) => Err(refused(&error)),
        }
    }

    fn status(&self, args: Args) -> Result<(), Error> {
        let options = Options::of(&args)?;
        match control::runs(&options.control) {
            Ok(true) => Ok(()),
            _ if !options.required => Ok(()),
            Ok(false) => Err(Error::PluginNotAvailable(no_agent(&options.control))),
            Err(error) => Err(Error::PluginNotAvailable(error.to_string())),
        }
    }

    /// The agent keeps nothing of an interface that has gone.
    fn gc(&self, _: Args) -> Result<(), Error> {
        Ok(())
    }
}

fn main() -> ExitCode {
    let version = concat!("rocinante-cni ", env!("CARGO_PKG_VERSION"));
    match Plugin::default().msg(version).run(&Chained) {
        Ok(()) => ExitCode::SUCCESS,
        // It has said why, as the protocol has it.
        Err(_) => ExitCode::FAILURE,
    }
}
