//! Decides what a resume token is: a JWT, HS512, good for one peer id until it expires, on any server with the key (8.7).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha512};
use uuid::Uuid;

/// Block size of SHA-512.
const BLOCK: usize = 128;

/// Makes and checks tokens.
#[derive(Clone)]
pub(crate) struct ResumeTokens {
    key: [u8; 64],
    key_id: String,
}

/// What a token says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Peer(Uuid),
    /// Without a key id it is ignored.
    Ignored,
    /// Why.
    Refused(&'static str),
}

impl ResumeTokens {
    pub(crate) fn new() -> Self {
        let mut key = [0; 64];
        rand::fill(&mut key);
        Self { key, key_id: Uuid::new_v4().to_string() }
    }

    pub(crate) fn issue(&self, peer: Uuid, life: Duration) -> String {
        let header = json!({ "alg": "HS512", "kid": self.key_id, "typ": "JWT" });
        let claims = json!({ "sub": peer.to_string(), "exp": (now() + life).as_secs() });
        let content = format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()));
        let signature = BASE64.encode(self.sign(content.as_bytes()));
        format!("{content}.{signature}")
    }

    pub(crate) fn verify(&self, token: &str) -> Verdict {
        let mut parts = token.split('.');
        let (Some(header), Some(claims), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Verdict::Refused(
                "verify payload: parse JWS: go-jose/go-jose: compact JWS format must have three parts",
            );
        };
        let (Some(header_json), Some(claims_json)) = (decode(header), decode(claims)) else {
            return Verdict::Refused("verify payload: parse JWS: invalid character in header");
        };
        match header_json.get("kid").and_then(Value::as_str) {
            None => return Verdict::Ignored,
            Some(key) if key != self.key_id => return Verdict::Refused("verify payload: key not found"),
            Some(_) => {}
        }
        let expected = self.sign(format!("{header}.{claims}").as_bytes());
        if BASE64.decode(signature).ok().as_deref() != Some(&expected[..]) {
            return Verdict::Refused("verify payload: go-jose/go-jose: error in cryptographic primitive");
        }
        if claims_json.get("exp").and_then(Value::as_u64).is_none_or(|exp| exp <= now().as_secs()) {
            return Verdict::Refused("validate claims: token is expired (exp)");
        }
        match claims_json.get("sub").and_then(Value::as_str).and_then(|sub| Uuid::parse_str(sub).ok()) {
            Some(peer) => Verdict::Peer(peer),
            None => Verdict::Refused("parse peer ID from token: invalid UUID"),
        }
    }

    /// HMAC-SHA-512.
    fn sign(&self, content: &[u8]) -> [u8; 64] {
        let pad = |byte: u8| {
            let mut block = [byte; BLOCK];
            block.iter_mut().zip(self.key).for_each(|(to, from)| *to ^= from);
            block
        };
        let inner = Sha512::new().chain_update(pad(0x36)).chain_update(content).finalize();
        Sha512::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
    }
}

impl std::fmt::Debug for ResumeTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ResumeTokens")
    }
}

pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn decode(part: &str) -> Option<Value> {
    serde_json::from_slice(&BASE64.decode(part).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_bound_to_key_and_time() {
        let tokens = ResumeTokens::new();
        let peer = Uuid::new_v4();
        let token = tokens.issue(peer, Duration::from_secs(60));
        assert_eq!(tokens.verify(&token), Verdict::Peer(peer));
        assert!(matches!(ResumeTokens::new().verify(&token), Verdict::Refused(_)));
        let expired = tokens.issue(peer, Duration::ZERO);
        assert_eq!(tokens.verify(&expired), Verdict::Refused("validate claims: token is expired (exp)"));
        let mut forged = token.clone();
        forged.pop();
        assert!(matches!(tokens.verify(&forged), Verdict::Refused(_)));
        let without_key = format!("{}.e30.x", BASE64.encode(r#"{"alg":"HS512"}"#));
        assert_eq!(tokens.verify(&without_key), Verdict::Ignored);
    }
}
