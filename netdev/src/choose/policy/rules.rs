//! The rules that an audit finds, and the verdict on a backend.

use crate::handed::{Report, ReportedRule};
use crate::kernel::denied::{Capability, Needs};
use crate::port::contract::Backend;

/// A rule that could concern RoCEv2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    /// What and where it is: `nft: rule 7 in chain output of table inet filter`.
    pub what: String,
    /// Whether [`Backend::Packet`] bypasses it too. [`Backend::Xdp`] bypasses all.
    pub packet_bypasses: bool,
}

/// The known rules on an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Audit {
    /// Rules that could concern RoCEv2.
    pub rules: Vec<Rule>,
    /// Rules that could not be read, and why.
    pub unseen: Vec<String>,
}

/// What reading rules needs, except those of tcx.
pub(super) const ADMIN: Needs =
    Needs { call: "reading rules", capabilities: &[Capability::NetAdmin], of_the_host: false };

/// The rules that a backend would bypass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuditVerdict {
    /// All rules were read, and it bypasses none.
    Clear,
    /// The backend bypasses these rules.
    Bypasses(Vec<String>),
    /// Some rules could not be read.
    Unseen(Vec<String>),
}

impl Audit {
    /// The rules that the given backend would bypass. A UDP socket bypasses none.
    #[must_use]
    pub(crate) fn verdict(&self, backend: Backend) -> AuditVerdict {
        if matches!(backend, Backend::Udp | Backend::Sim) {
            return AuditVerdict::Clear;
        }
        let bypassed: Vec<String> = self
            .rules
            .iter()
            .filter(|rule| backend == Backend::Xdp || rule.packet_bypasses)
            .map(|rule| rule.what.clone())
            .collect();
        if !bypassed.is_empty() {
            AuditVerdict::Bypasses(bypassed)
        } else if !self.unseen.is_empty() {
            AuditVerdict::Unseen(self.unseen.clone())
        } else {
            AuditVerdict::Clear
        }
    }

    pub(super) fn found(&mut self, what: String, packet_bypasses: bool) {
        let rule = Rule { what, packet_bypasses };
        if !self.rules.contains(&rule) {
            self.rules.push(rule);
        }
    }

    /// Records rules that could not be read, and why; `denied` explains `EPERM`.
    pub(super) fn note_unseen(
        &mut self,
        what: &str,
        denied: impl FnOnce() -> String,
        error: &std::io::Error,
    ) {
        let why = match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => denied(),
            _ => error.to_string(),
        };
        let unseen = format!("{what} cannot be read ({why})");
        if !self.unseen.contains(&unseen) {
            self.unseen.push(unseen);
        }
    }
}

impl From<&Audit> for Report {
    fn from(audit: &Audit) -> Self {
        let rule = |rule: &Rule| ReportedRule {
            what: rule.what.clone(),
            packet_bypasses: rule.packet_bypasses,
        };
        Self { rules: audit.rules.iter().map(rule).collect(), unseen: audit.unseen.clone() }
    }
}

impl From<Report> for Audit {
    fn from(report: Report) -> Self {
        let rule =
            |rule: ReportedRule| Rule { what: rule.what, packet_bypasses: rule.packet_bypasses };
        Self { rules: report.rules.into_iter().map(rule).collect(), unseen: report.unseen }
    }
}
