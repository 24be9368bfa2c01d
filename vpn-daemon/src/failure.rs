//! What went wrong, in a form that a person and a program can both use: a code, what happened, what to do.

use codervpn_proto::ext::{self, FailureCode};

/// Never holds a secret: texts come from us or were stripped where they came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: FailureCode,
    /// What happened, one sentence.
    pub message: String,
    /// What to do about it; may be empty.
    pub remedy: String,
}

impl Failure {
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), remedy: String::new() }
    }

    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    pub fn to_proto(&self) -> ext::Failure {
        ext::Failure { code: self.code.into(), message: self.message.clone(), remedy: self.remedy.clone() }
    }
}

/// One text, as frontends show it that know nothing of codes.
impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}
