//! Attempts without end are logged when their outcome changes.

/// The last line.
#[derive(Debug, Default)]
pub(crate) struct Said(String);

impl Said {
    pub(crate) fn warn(&mut self, line: String) {
        if self.is_new(line) {
            tracing::warn!("{}", self.0);
        }
    }

    pub(crate) fn info(&mut self, line: String) {
        if self.is_new(line) {
            tracing::info!("{}", self.0);
        }
    }

    fn is_new(&mut self, line: String) -> bool {
        let is_new = self.0 != line;
        self.0 = line;
        is_new
    }
}
