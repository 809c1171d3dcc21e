//! Containers are released without an agent, so that nothing stays of one that is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use rocinante_netdev::handed::{capture, guard, page};

use crate::asker::Own;
use crate::config::Config;
use crate::control::{self, Reply};
use crate::ends::Ends;
use crate::error::AgentError;
use crate::holders::{self, Sought};
use crate::host::{HostLink, Namespaces, NsId, Shaper, SourceFilter, is_ours};
use crate::links::peer_elsewhere;
use crate::listener::remove_left;
use crate::pages::Pages;
use crate::state::{Known, StateFile};

/// Takes the programs off the hosts' ends of a container, or of all, in this network namespace.
/// With all, the agent's files go too. Error: an agent runs after all, or the state cannot be read
/// and `force` is not set; or the kernel's.
pub(crate) fn release(
    config: &Config,
    name: Option<&str>,
    force: bool,
    each: &mut dyn FnMut(Reply),
) -> Result<(), AgentError> {
    let hint = "be root, in the network namespace of the agent";
    let failed = |e| AgentError::os("programs cannot be taken off", &e, hint);
    let own = Own::new().map_err(failed)?;
    let host_ends = Ends::new().map_err(failed)?;
    let file = StateFile::open(&config.state, own.network().inode())
        .map_err(|e| AgentError::os(config.state.display(), &e, hint))?;
    let (mut known, claims) = match file.read() {
        Ok(state) => (state.containers, state.claims),
        Err(_) if force => Default::default(),
        Err(why) => {
            let what = format!("the state does not say which ports are open: {why}");
            return Err(AgentError::new(what, "--force does not ask for it"));
        }
    };
    // All ends of a container go together.
    let mut all = BTreeMap::<(Option<NsId>, u32), Vec<HostLink>>::new();
    for link in Namespaces::open().and_then(|mut it| it.links(None)).map_err(failed)? {
        if is_ours(&link).map_err(failed)? {
            let of = peer_elsewhere(&link).map(|(namespace, _)| namespace);
            let alone = if of.is_none() { link.index } else { 0 };
            all.entry((of, alone)).or_default().push(link);
        }
    }
    let is_wanted = |link: &HostLink| name.is_none_or(|name| name == link.name);
    all.retain(|_, links| links.iter().any(is_wanted));
    if let (Some(name), true) = (name, all.is_empty()) {
        return Err(AgentError::new(format!("no container is called {name:?}"), ""));
    }
    let mut are_all_gone = true;
    for links in all.into_values() {
        let ends: BTreeSet<u32> = links.iter().map(|link| link.index).collect();
        let mut of_it = known.iter().filter(|it| ends.contains(&it.host_end));
        let is_held = of_it.any(|it| has_port(it, &known, &own, &host_ends));
        for HostLink { index, name, .. } in links {
            if is_held && !force {
                each(Reply::Kept { name, reason: "it has open ports".into() });
                are_all_gone = false;
                continue;
            }
            let detached = SourceFilter::detach_all(index);
            detached.and_then(|()| Shaper::open()?.clear(index)).map_err(failed)?;
            known.retain(|it| it.host_end != index);
            each(Reply::Released { name });
        }
    }
    if name.is_some() || !are_all_gone {
        let written = file.write(known, claims);
        return written.map_err(|e| AgentError::os(config.state.display(), &e, hint));
    }
    // Of containers that have gone since the agent ended, and of all.
    for link in Namespaces::open().and_then(|mut it| it.links(None)).map_err(failed)? {
        Shaper::open().and_then(|mut it| it.unshare(link.index)).map_err(failed)?;
        if let Some(end) = Shaper::end_of(&link.name, &link.kind) {
            Shaper::open().and_then(|mut it| it.remove_ifb(end)).map_err(failed)?;
        }
    }
    remove_files(config);
    Ok(())
}

/// Whether a process has one of the ports that an agent handed over.
fn has_port(of: &Known, all: &[Known], own: &Own, ends: &Ends) -> bool {
    of.ports.iter().any(|port| {
        let sockets = port.sockets.iter().copied().collect();
        let all = all.iter().map(|it| (it.namespace, &it.called));
        let sought = Sought::of(sockets, (of.namespace, &of.called), all);
        holders::find(&sought, own, ends).is_some()
    })
}

/// Removes the state, sockets that a killed agent left, and the directories if nothing else is
/// there.
fn remove_files(config: &Config) {
    let (socket, state) = (&config.socket, &config.state);
    let beside = [guard::path(socket), page::path(socket), capture::path(socket)];
    let of_root = [control::path(state), control::stat_path(state)];
    [socket].into_iter().chain(&beside).chain(&of_root).for_each(|socket| remove_left(socket));
    for file in [config.state.clone(), Pages::path(&config.state)] {
        let _ = fs::remove_file(file.with_extension("new"));
        let _ = fs::remove_file(file);
    }
    for file in [&config.state, &config.socket] {
        let _ = file.parent().map(fs::remove_dir);
    }
}
