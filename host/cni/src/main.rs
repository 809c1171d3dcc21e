//! `rocinante-cni`: a plugin for the end of a chain of CNI plugins (CNI specification 1.1.0). It
//! has the agent of this host know each interface before the container runs: from then on only the
//! addresses that the engine gave it leave there, also if the container may change them. The agent
//! also sets the interface's MTU and rates.
//!
//! Keys of its configuration: `control`, the path of the agent's control socket; `required`
//! (true), whether a container that the agent does not serve is to fail; `class`, the name of the
//! container's class in the agent's configuration; `mtu`, that of both ends of the interface. Its
//! capability is `bandwidth`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rocinante_agent::control::{self, About};
use rocinante_agent::host::Rates;
use rocinante_agent::{AgentError, Rate};

use rscni_plugin::cni::{Cni, Plugin};
use rscni_plugin::error::Error;
use rscni_plugin::types::{Args, CNIResult};
use rscni_plugin::version::SpecVersion;
use serde_json::Value;

/// The code of the specification's free range for an interface that the agent does not serve.
const REFUSED: u32 = 100;

/// The first version of the specification in which a result has MTUs.
const HAS_MTU: SpecVersion = SpecVersion::new(1, 1, 0);

/// The fields of `runtimeConfig.bandwidth`: bits in a second, and bits.
const BANDWIDTH: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

struct Chained;

/// The plugin's own keys.
struct Options {
    control: PathBuf,
    required: bool,
    class: Option<String>,
    mtu: Option<u32>,
    rates: Option<Rates>,
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
        let mtu = match own.get("mtu") {
            None => None,
            Some(mtu) => {
                let mtu = mtu.as_u64().ok_or_else(|| wrong("mtu", "number of bytes"))?;
                let fits = u32::try_from(mtu).ok().filter(|mtu| control::MTU.contains(mtu));
                let (least, most) = control::MTU.into_inner();
                Some(fits.ok_or_else(|| wrong("mtu", &format!("number from {least} to {most}")))?)
            }
        };
        let runtime = args.config().runtime_config.as_ref();
        let rates = match runtime.and_then(|it| it.custom.get("bandwidth")) {
            None | Some(Value::Null) => None,
            Some(bandwidth) => Some(rates(bandwidth)?),
        };
        Ok(Self { control, required, class, mtu, rates })
    }
}

/// The rates of `runtimeConfig.bandwidth`, by the rules of the plugin `bandwidth`
/// (<https://www.cni.dev/plugins/current/meta/bandwidth/>): 0 is none.
fn rates(bandwidth: &Value) -> Result<Rates, Error> {
    let wrong = |why: &str| Error::InvalidNetworkConfig(format!("runtimeConfig.bandwidth: {why}"));
    let fields = bandwidth.as_object().ok_or_else(|| wrong("it is no object"))?;
    let mut bits = BTreeMap::new();
    for (key, value) in fields {
        // Without regard to case, as in Go: containerd writes "IngressRate".
        let Some(known) = BANDWIDTH.into_iter().find(|it| it.eq_ignore_ascii_case(key)) else {
            let what = format!("runtimeConfig.bandwidth.{key}: {value}");
            return Err(Error::UnsupportedNetworkConfiguration(what));
        };
        let number = if value.is_null() { Some(0) } else { value.as_u64() };
        let number = number.ok_or_else(|| wrong(&format!("{known} is no number of bits")))?;
        if bits.insert(known, number).is_some() {
            return Err(wrong(&format!("{known} is there twice")));
        }
    }
    let of = |key: &str| bits.get(key).copied().unwrap_or(0);
    let way = |rate: &str, burst: &str| match (of(rate), of(burst)) {
        (0, 0) => Ok((None, None)),
        (0, _) | (_, 0) => Err(wrong(&format!("{rate} and {burst} need each other"))),
        (_, bits) if bits / 8 >= u64::from(u32::MAX) => {
            Err(wrong(&format!("{burst} is less than 4 GiB, in bits")))
        }
        (rate_bits, burst_bits) => {
            let rate_of = Rate::of_bits(rate_bits).map_err(|why| wrong(&format!("{rate}: {why}")));
            Ok((Some(rate_of?), Some(burst_bits)))
        }
    };
    let (ingress, ingress_burst_bits) = way("ingressRate", "ingressBurst")?;
    let (egress, egress_burst_bits) = way("egressRate", "egressBurst")?;
    Ok(Rates { ingress, egress, ingress_burst_bits, egress_burst_bits })
}

/// The result of the plugins before, with the MTU of both ends of the interface.
fn with_mtu(mut result: CNIResult, args: &Args, host_end: &str, mtu: u32) -> CNIResult {
    for it in &mut result.interfaces {
        let is_in_it = it.sandbox.as_ref().is_some_and(|sandbox| !sandbox.is_empty());
        let own = if is_in_it { args.ifname().map(AsRef::as_ref) } else { Some(host_end) };
        if own == Some(it.name.as_str()) {
            it.mtu = Some(mtu);
        }
    }
    result
}

/// The UID of the pod, as containerd and CRI-O have it in `CNI_ARGS`.
fn pod(args: &str) -> Option<&str> {
    args.split(';').find_map(|pair| pair.strip_prefix("K8S_POD_UID=")).filter(|it| !it.is_empty())
}

/// The container of an operation, for the agent.
fn about(args: &Args, options: &Options) -> Result<About, Error> {
    let missing = |name: &str| Error::InvalidEnvValue(format!("{name} is missing"));
    Ok(About {
        namespace: args.netns().ok_or_else(|| missing("CNI_NETNS"))?.clone(),
        interface: Some(args.ifname().ok_or_else(|| missing("CNI_IFNAME"))?.to_string()),
        id: args.container_id().ok_or_else(|| missing("CNI_CONTAINERID"))?.to_string(),
        engine: "cni".to_owned(),
        pod: args.args().and_then(pod).map(str::to_owned),
        class: options.class.clone(),
        rates: options.rates,
        mtu: options.mtu,
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
        let has_mtu = args.config().version()? >= HAS_MTU;
        let failed = match control::introduce(&options.control, &about(&args, &options)?) {
            Ok(Some(host_end)) => {
                return Ok(match options.mtu {
                    Some(mtu) if has_mtu => with_mtu(before, &args, &host_end, mtu),
                    _ => before,
                });
            }
            Ok(None) => Error::TryAgainLater(no_agent(&options.control)),
            Err(error) => refused(&error),
        };
        if options.required {
            return Err(failed);
        }
        eprintln!("rocinante-cni: {failed}");
        Ok(before)
    }

    /// The rules and rates go with the interface, which the plugins before take away.
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
