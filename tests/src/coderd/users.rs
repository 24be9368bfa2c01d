//! Who may ask: users with their tokens, and how a token is refused (1.3, 1.6).

use std::collections::BTreeMap;

use http::HeaderMap;
use rand::distr::{Alphanumeric, SampleString as _};
use secrecy::{ExposeSecret as _, SecretString};
use uuid::Uuid;

use super::answers::{INTERNAL, NO_KEY, Problem};

/// A person with a session token.
#[derive(Debug, Clone)]
pub struct User {
    pub id: Uuid,
    pub name: String,
    token: SecretString,
}

impl User {
    pub(super) fn new(name: &str) -> Self {
        Self::with(Uuid::new_v4(), name, &new_token())
    }

    pub(super) fn with(id: Uuid, name: &str, token: &str) -> Self {
        Self { id, name: name.to_owned(), token: SecretString::from(token.to_owned()) }
    }

    /// For those who log in with it.
    pub fn token(&self) -> &str {
        self.token.expose_secret()
    }

    pub fn secret(&self) -> SecretString {
        self.token.clone()
    }
}

/// A session token in its normal form: ten characters, a dash, twenty-two.
pub fn new_token() -> String {
    let mut rng = rand::rng();
    format!("{}-{}", Alphanumeric.sample_string(&mut rng, 10), Alphanumeric.sample_string(&mut rng, 22))
}

/// Whether a token is good at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    Active,
    /// `User is not active`, with this status.
    Inactive(String),
    /// The token has expired or was logged out.
    Expired,
}

/// The endpoints differ in what they say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asker {
    User,
    /// `workspaceagents/connection`, which workspace proxies may ask, too.
    UserOrProxy,
}

#[derive(Debug, Default)]
pub(super) struct Users {
    /// By token id.
    by_token: BTreeMap<String, (User, Standing)>,
}

impl Users {
    pub(super) fn add(&mut self, user: User) {
        let id = token_id(user.token()).map_or_else(|| user.token().to_owned(), str::to_owned);
        self.by_token.insert(id, (user, Standing::Active));
    }

    pub(super) fn set_standing(&mut self, id: Uuid, standing: &Standing) {
        for (user, current) in self.by_token.values_mut() {
            if user.id == id {
                *current = standing.clone();
            }
        }
    }

    pub(super) fn list(&self) -> Vec<User> {
        self.by_token.values().map(|(user, _)| user.clone()).collect()
    }

    /// Who asks, or the answer.
    pub(super) fn authenticate(
        &self,
        headers: &HeaderMap,
        asker: Asker,
        database_down: bool,
    ) -> Result<&User, Problem> {
        let refuse = |problem: Problem| match asker {
            Asker::User => problem,
            // This text never tells why.
            Asker::UserOrProxy => Problem::new(401, NO_KEY),
        };
        if database_down {
            let detail = "Internal error fetching API key by id. fetch API key: dial tcp: connection refused";
            return Err(refuse(Problem::new(401, INTERNAL).detail(detail)));
        }
        let Some(token) = token(headers) else {
            let detail = "Cookie \"coder_session_token\" or query parameter must be provided.";
            return Err(refuse(Problem::signed_out(detail)));
        };
        let (user, standing) = self.find(token).map_err(|detail| refuse(Problem::signed_out(detail)))?;
        match standing {
            Standing::Active => Ok(user),
            Standing::Inactive(status) => Err(Problem::new(
                401,
                format!("User is not active (status = {status:?}). Contact an admin to reactivate your account."),
            )),
            Standing::Expired => {
                Err(refuse(Problem::signed_out("API key expired at \"2026-01-01 00:00:00 +0000 UTC\".")))
            }
        }
    }

    fn find(&self, token: &str) -> Result<&(User, Standing), String> {
        if let Some(found) = self.by_token.values().find(|(user, _)| user.token() == token) {
            return Ok(found);
        }
        let Some(id) = token_id(token) else {
            return Err("Invalid API key format: incorrect amount of API key parts, expected 2".into());
        };
        let known = self.by_token.contains_key(id);
        Err(if known { "API key secret is invalid." } else { "API key is invalid." }.into())
    }
}

/// The first of several headers counts.
pub(super) fn token(headers: &HeaderMap) -> Option<&str> {
    let header = headers.get("coder-session-token").and_then(|value| value.to_str().ok());
    let bearer = || headers.get(http::header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ");
    header.filter(|token| !token.is_empty()).or_else(bearer)
}

fn token_id(token: &str) -> Option<&str> {
    let (id, secret) = token.split_once('-')?;
    (id.len() == 10 && secret.len() == 22).then_some(id)
}
