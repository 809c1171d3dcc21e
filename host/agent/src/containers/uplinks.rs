//! The uplinks that containers share.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::PoisonError;

use tokio::sync::watch::Receiver;

use super::{Containers, HeardOf};
use crate::class::Uplink;
use crate::control::UplinkStatus;
use crate::host::{Portion, Shaper};
use crate::rate::Rate;

/// The uplinks as the agent has set them.
#[derive(Debug, Default)]
pub(super) struct Uplinks {
    /// The shares that are set, by the index of the uplink.
    set: BTreeMap<u32, (Rate, Vec<Portion>)>,
    reported: Reported,
}

/// The state that `watch` reports to drivers: uplinks, and the host's ends of pods.
#[derive(Debug, Default, PartialEq)]
struct Reported {
    uplinks: Vec<Uplink>,
    /// By the name of the uplink.
    faults: BTreeMap<String, String>,
    pods: Vec<(u32, String)>,
}

impl Containers {
    /// Forgets the shares of links that have gone: a later one may have the index, or the same one
    /// may be back without them.
    pub(super) fn forget_uplinks(&self, heard: &BTreeSet<HeardOf>) {
        let mut uplinks = self.uplinks.lock().unwrap_or_else(PoisonError::into_inner);
        let has_gone =
            |of| heard.contains(&HeardOf::Gone(of)) || heard.contains(&HeardOf::Anything);
        uplinks.set.retain(|index, _| !has_gone(*index));
    }

    /// Has containers share the uplinks of the configuration, by their classes. With `again` it
    /// also takes the parts of ours off other links.
    pub(super) fn share_uplinks(&self, again: bool) {
        let config = self.config();
        let mut uplinks = self.uplinks.lock().unwrap_or_else(PoisonError::into_inner);
        if config.uplinks.is_empty() && !again {
            return;
        }
        let mut inner = self.lock();
        let uplinks_of = config.uplinks.iter();
        let portions: Vec<Vec<Portion>> =
            uplinks_of.map(|uplink| inner.portions(&config, &uplink.interface)).collect();
        let pods =
            inner.containers.iter().filter_map(|(end, it)| Some((*end, it.pod()?.to_owned())));
        let pods: Vec<(u32, String)> = pods.collect();
        let links = inner.namespaces.links(None);
        // Nothing of containers waits for the questions to the kernel.
        drop(inner);
        let links = match links {
            Ok(links) => links,
            Err(error) => {
                tracing::warn!("uplinks stay as they are: the links cannot be read: {error}");
                if uplinks.reported.pods != pods {
                    uplinks.reported.pods = pods;
                    self.news.send_replace(());
                }
                return;
            }
        };
        let mut faults = BTreeMap::new();
        for (uplink, portions) in config.uplinks.iter().zip(portions) {
            let fault = match links.iter().find(|link| link.name == uplink.interface) {
                None => Some("there is no such interface".to_owned()),
                Some(link) => {
                    let wanted = (uplink.rate, portions);
                    if !again && uplinks.set.get(&link.index) == Some(&wanted) {
                        continue;
                    }
                    uplinks.set.remove(&link.index);
                    match share(link.index, &link.name, &wanted) {
                        Ok(()) => {
                            uplinks.set.insert(link.index, wanted);
                            None
                        }
                        Err(why) => Some(why),
                    }
                }
            };
            if let Some(fault) = fault {
                if uplinks.reported.faults.get(&uplink.interface) != Some(&fault) {
                    tracing::error!(uplink = uplink.interface, "it is not shared: {fault}");
                }
                faults.insert(uplink.interface.clone(), fault);
            }
        }
        let reported = Reported { uplinks: config.uplinks.clone(), faults, pods };
        if uplinks.reported != reported {
            uplinks.reported = reported;
            self.news.send_replace(());
        }
        let is_uplink = |name: &String| config.uplinks.iter().any(|it| it.interface == *name);
        for link in links.iter().filter(|link| again && !is_uplink(&link.name)) {
            uplinks.set.remove(&link.index);
            if let Err(error) = Shaper::open().and_then(|mut it| it.unshare(link.index)) {
                tracing::warn!(link = link.name, "its shares stay: {error}");
            }
        }
    }

    /// Says when a driver has something to do.
    pub(crate) fn news(&self) -> Receiver<()> {
        self.news.subscribe()
    }

    /// The uplinks of the configuration.
    pub(crate) fn uplinks(&self) -> Vec<UplinkStatus> {
        let config = self.config();
        let uplinks = self.uplinks.lock().unwrap_or_else(PoisonError::into_inner);
        let all = config.uplinks.iter().map(|uplink| UplinkStatus {
            interface: uplink.interface.clone(),
            rate: uplink.rate,
            fault: uplinks.reported.faults.get(&uplink.interface).cloned(),
        });
        all.collect()
    }

    /// Takes all shares off.
    pub(super) fn unshare_all(&self) -> io::Result<()> {
        let mut uplinks = self.uplinks.lock().unwrap_or_else(PoisonError::into_inner);
        uplinks.set.clear();
        let links = self.lock().namespaces.links(None)?;
        for link in links {
            Shaper::open()?.unshare(link.index)?;
        }
        Ok(())
    }
}

/// Without a share the link is as it was.
fn share(link: u32, name: &str, (rate, portions): &(Rate, Vec<Portion>)) -> Result<(), String> {
    let mut shaper = Shaper::open().map_err(|e| e.to_string())?;
    if portions.is_empty() {
        return shaper.unshare(link).map(drop).map_err(|e| e.to_string());
    }
    shaper.share(link, name, *rate, portions).map_err(|e| e.to_string())
}
