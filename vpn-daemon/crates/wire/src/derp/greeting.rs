//! Decides what client and relay tell each other in the two sealed greetings, for both sides.
//!
//! The box proves to the relay that the client owns its key. Its content is JSON; member names match in any case and
//! unknown members are ignored, as Go's decoder does it. `serde_json` bounds the nesting, the frame limits the size.

use serde_json::{Map, Value};

use super::{PROTOCOL_VERSION, kind, write_frame};
use crate::keys::{KeyError, NodePrivate, NodePublic, Nonce, OpenError, SharedKey};

/// What Go's client sends to the byte; ours sends the same.
const CLIENT_INFO: &[u8] = br#"{"version":2,"CanAckPings":true}"#;

/// What a client says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientInfo {
    /// Protocol version, 0 if it does not say.
    pub version: i64,
    /// It answers pings.
    pub can_ack_pings: bool,
    /// It only measures.
    pub is_prober: bool,
    /// It claims to be part of a mesh. Gives no rights here.
    pub has_mesh_key: bool,
}

/// What a relay says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerInfo {
    /// Protocol version, 0 if it does not say.
    pub version: i64,
    /// Send no faster than this, if it says so.
    pub rate_limit: Option<RateLimit>,
}

/// The relay's wish for our sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Steady rate.
    pub bytes_per_second: u64,
    /// At once.
    pub burst: u64,
}

impl Default for ServerInfo {
    fn default() -> Self {
        Self { version: PROTOCOL_VERSION, rate_limit: None }
    }
}

/// Why a greeting was refused. Fatal for the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GreetingError {
    /// Nobody can share a secret with this key.
    #[error("invalid key in the relay's greeting: {0}")]
    Key(#[from] KeyError),
    /// The other side does not own the key it shows.
    #[error("the relay's sealed greeting does not open")]
    Seal(#[from] OpenError),
    /// Opened, but not the JSON that it should be.
    #[error("the relay's sealed greeting is not understood")]
    Json,
}

/// Appends a client's greeting to the relay with `server`'s key.
///
/// # Errors
/// The server's key is unfit.
pub fn write_client_info(
    out: &mut Vec<u8>,
    private: &NodePrivate,
    server: &NodePublic,
    nonce: &Nonce,
) -> Result<SharedKey, KeyError> {
    let shared = private.shared_key(server)?;
    let mut sealed = Vec::with_capacity(CLIENT_INFO.len() + crate::keys::SEAL_OVERHEAD);
    shared.seal_append(nonce, CLIENT_INFO, &mut sealed);
    write_frame(out, kind::CLIENT_INFO, &[private.public().as_bytes(), &sealed]);
    Ok(shared)
}

/// Opens a client's greeting at the relay. The returned box also seals the answer.
///
/// # Errors
/// See [`GreetingError`].
pub fn open_client_info(
    private: &NodePrivate,
    client: &NodePublic,
    sealed: &[u8],
) -> Result<(ClientInfo, SharedKey), GreetingError> {
    let shared = private.shared_key(client)?;
    let members = open_json(&shared, sealed)?;
    let info = ClientInfo {
        version: integer(&members, "version")?,
        can_ack_pings: boolean(&members, "CanAckPings")?,
        is_prober: boolean(&members, "IsProber")?,
        has_mesh_key: match member(&members, "meshKey") {
            None => false,
            Some(Value::String(key)) => !key.is_empty(),
            Some(_) => return Err(GreetingError::Json),
        },
    };
    Ok((info, shared))
}

/// Appends the relay's answer.
pub fn write_server_info(out: &mut Vec<u8>, shared: &SharedKey, nonce: &Nonce, info: &ServerInfo) {
    let mut json = format!("{{\"version\":{}", info.version);
    if let Some(limit) = info.rate_limit {
        for (name, value) in
            [("TokenBucketBytesPerSecond", limit.bytes_per_second), ("TokenBucketBytesBurst", limit.burst)]
        {
            if value > 0 {
                json.push_str(&format!(",\"{name}\":{value}"));
            }
        }
    }
    json.push('}');
    let mut sealed = Vec::with_capacity(json.len() + crate::keys::SEAL_OVERHEAD);
    shared.seal_append(nonce, json.as_bytes(), &mut sealed);
    write_frame(out, kind::SERVER_INFO, &[&sealed]);
}

/// Opens the relay's answer with the box of [`write_client_info`].
///
/// # Errors
/// See [`GreetingError`].
pub fn open_server_info(shared: &SharedKey, sealed: &[u8]) -> Result<ServerInfo, GreetingError> {
    let members = open_json(shared, sealed)?;
    let positive = |name| integer(&members, name).map(|value| u64::try_from(value).unwrap_or(0));
    let (rate, burst) = (positive("TokenBucketBytesPerSecond")?, positive("TokenBucketBytesBurst")?);
    let rate_limit = (rate > 0).then_some(RateLimit { bytes_per_second: rate, burst });
    Ok(ServerInfo { version: integer(&members, "version")?, rate_limit })
}

fn open_json(shared: &SharedKey, sealed: &[u8]) -> Result<Map<String, Value>, GreetingError> {
    let mut bytes = sealed.to_vec();
    let content = shared.open_in_place(&mut bytes)?;
    serde_json::from_slice(content).map_err(|_| GreetingError::Json)
}

/// Null counts as absent.
fn member<'a>(members: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let exact = members.get(name);
    let found =
        exact.or_else(|| members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value));
    found.filter(|value| !value.is_null())
}

fn integer(members: &Map<String, Value>, name: &str) -> Result<i64, GreetingError> {
    member(members, name).map_or(Ok(0), |value| value.as_i64().ok_or(GreetingError::Json))
}

fn boolean(members: &Map<String, Value>, name: &str) -> Result<bool, GreetingError> {
    member(members, name).map_or(Ok(false), |value| value.as_bool().ok_or(GreetingError::Json))
}
