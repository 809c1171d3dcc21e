//! Replaces `verbs-api/soft/src/gids.rs`: the model's port is no interface, and nothing follows it.

use std::io;
use std::net::IpAddr;

use crate::model::event::AsyncEvent;
use crate::provider::wake::BorrowedFd;

#[derive(Debug)]
pub struct GidTable;

/// There is none.
#[derive(Debug)]
pub(super) enum Followed {}

impl Followed {
    pub(super) fn open(_: u32, _: GidTable, _: BorrowedFd<'_>) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    pub(super) fn gids(&self) -> Vec<Option<IpAddr>> {
        match *self {}
    }

    pub(super) fn take_places(&self, _: &[Option<IpAddr>]) {
        match *self {}
    }

    pub(super) fn look(&self, _: impl FnMut(AsyncEvent)) {
        match *self {}
    }

    pub(super) fn look_on(&self, _: impl Fn() -> bool + Send + 'static) -> io::Result<()> {
        match *self {}
    }
}
