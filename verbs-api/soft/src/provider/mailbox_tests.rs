//! Mailboxes; `mailbox.rs` is compiled by `tests/models`, too.

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::wire::cm::CommId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::mailbox::Mailbox;
use crate::model::error::VerbsError;

fn readable(mailbox: &Mailbox) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(mailbox.fd().unwrap(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn a_failure_is_told_after_what_came_before_and_for_ever() {
    let (mailbox, conn) = (Mailbox::default(), ConnId(CommId(7)));
    assert!(!readable(&mailbox));
    let _ = mailbox.push(CmEvent::Established { conn });
    let _ = mailbox.fail(VerbsError::TimedOut);
    assert!(matches!(mailbox.pop(), Ok(Some(CmEvent::Established { .. }))));
    assert!(matches!(mailbox.pop(), Err(VerbsError::TimedOut)));
    for _ in 0..3 {
        let again = mailbox.pop().unwrap_err();
        assert!(matches!(again, VerbsError::Io(_)), "{again:?}");
        assert_eq!(again.errno(), Errno::TIMEDOUT.raw_os_error());
        assert!(readable(&mailbox));
    }
}

#[test]
fn a_mailbox_of_which_the_last_letter_is_withdrawn_is_not_readable() {
    let [first, second] = [7, 8].map(|number| ConnId(CommId(number)));
    let mailbox = Mailbox::default();
    assert!(!readable(&mailbox));
    for conn in [first, second] {
        let _ = mailbox.push(CmEvent::Established { conn });
    }
    let withdraw = |of| {
        mailbox.retain(|event| !matches!(event, CmEvent::Established { conn } if *conn == of));
    };
    withdraw(first);
    assert!(readable(&mailbox), "the other waits");
    withdraw(second);
    assert!(!readable(&mailbox));
    assert!(matches!(mailbox.pop(), Ok(None)));
    let _ = mailbox.push(CmEvent::TimedOut { conn: first });
    assert!(readable(&mailbox) && matches!(mailbox.pop(), Ok(Some(_))));
    let _ = mailbox.push(CmEvent::Established { conn: second });
    withdraw(second);
    assert!(readable(&mailbox), "it is over, for all that look");
}

/// A descriptor that is asked for late says of all that came before what an early one does.
#[test]
fn a_descriptor_that_is_made_late_is_as_readable_as_an_early_one() {
    let conn = ConnId(CommId(7));
    let events = || [CmEvent::Established { conn }, CmEvent::TimedOut { conn }];
    for put in 0..=2 {
        for taken in 0..=put {
            let mailboxes = [Mailbox::default(), Mailbox::default()];
            let early = &mailboxes[0];
            early.fd().unwrap();
            for mailbox in &mailboxes {
                events().into_iter().take(put).for_each(|event| drop(mailbox.push(event)));
                (0..taken).for_each(|_| assert!(mailbox.pop().unwrap().is_some()));
            }
            let are = mailboxes.each_ref().map(readable);
            assert_eq!(are, [taken < put || put == 2; 2], "{taken} of {put}");
        }
    }
    let failed = Mailbox::default();
    let _ = failed.fail(VerbsError::TimedOut);
    failed.pop().unwrap_err();
    assert!(readable(&failed));
}
