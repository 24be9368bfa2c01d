//! Every byte vector of CoderVPN: built here field by field, compared with the
//! bytes, decoded from the whole frame and from single bytes.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

use std::collections::BTreeMap;

use codervpn_proto::frame::{self, Decoder, FrameError, MAX_BODY};
use codervpn_proto::ids::RequestId;
use codervpn_proto::rpc::{self, Body, Ignored, Inbound, Kind, Message};
use codervpn_proto::vpn::{
    self, client_message, manager_message, network_settings_request as settings, service_message, tunnel_message,
};
use prost_types::{Duration, Timestamp};

const TOKEN: &str = "abcdefghij-0123456789ABCDEFGHIJKL";
const WORKSPACE: &str = "0b5a4d2e6f3c4b1a9d8e7c6b5a493827";
const AGENT: &str = "7f3c9a521d4e4b86a2c75e90d1f8b364";

fn unhex(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2), "{hex}");
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn vectors() -> BTreeMap<&'static str, Vec<u8>> {
    include_str!("data/codervpn.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut words = line.split(' ');
            (words.next().unwrap(), unhex(words.next().unwrap()))
        })
        .collect()
}

/// The bodies in `bytes`, fed in pieces of `piece` bytes.
fn bodies(bytes: &[u8], piece: usize) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::new(MAX_BODY);
    let mut found = Vec::new();
    for part in bytes.chunks(piece) {
        decoder.feed(part);
        while let Some(body) = decoder.next_body().unwrap() {
            found.push(body.to_vec());
        }
    }
    decoder.finish().unwrap();
    found
}

fn check<M: Message + PartialEq + std::fmt::Debug>(name: &str, frame: &[u8], expected: &M) {
    assert_eq!(frame::encode(expected, MAX_BODY).unwrap(), frame, "encoding of {name}");
    for piece in [1, 3, frame.len()] {
        let bodies = bodies(frame, piece);
        assert_eq!(bodies.len(), 1, "{name}");
        assert_eq!(&frame::decode::<M>(&bodies[0]).unwrap(), expected, "{name}");
    }
}

fn id(number: u64) -> RequestId {
    RequestId::new(number).unwrap()
}

fn workspace(status: vpn::workspace::Status) -> vpn::Workspace {
    vpn::Workspace { id: unhex(WORKSPACE), name: "dev".into(), status: status.into() }
}

fn bare_agent() -> vpn::Agent {
    vpn::Agent { id: unhex(AGENT), name: "main".into(), workspace_id: unhex(WORKSPACE), ..Default::default() }
}

fn fresh_agent() -> vpn::Agent {
    vpn::Agent {
        fqdn: vec!["dev.coder.".into(), "main.dev.me.coder.".into(), "main.dev.alice.coder.".into()],
        ip_addrs: vec!["fd60:627a:a42b:4b86:a2c7:5e90:d1f8:b364".into()],
        ..bare_agent()
    }
}

fn agent() -> vpn::Agent {
    let nanos = |nanos| Duration { seconds: 0, nanos };
    vpn::Agent {
        last_handshake: Some(Timestamp { seconds: 1_749_988_800, nanos: 250_000_000 }),
        last_ping: Some(vpn::LastPing {
            latency: Some(nanos(12_345_000)),
            did_p2p: true,
            preferred_derp: "Frankfurt".into(),
            preferred_derp_latency: Some(nanos(8_500_000)),
        }),
        ..fresh_agent()
    }
}

fn peers(agent: vpn::Agent) -> vpn::PeerUpdate {
    vpn::PeerUpdate {
        upserted_workspaces: vec![workspace(vpn::workspace::Status::Running)],
        upserted_agents: vec![agent],
        ..Default::default()
    }
}

fn status(lifecycle: vpn::status::Lifecycle, peers: vpn::PeerUpdate) -> service_message::Msg {
    service_message::Msg::Status(vpn::Status {
        lifecycle: lifecycle.into(),
        peer_update: Some(peers),
        ..Default::default()
    })
}

fn progress(stage: vpn::StartProgressStage, download: Option<(u64, Option<u64>)>) -> service_message::Msg {
    service_message::Msg::StartProgress(vpn::StartProgress {
        stage: stage.into(),
        download_progress: download
            .map(|(bytes_written, bytes_total)| vpn::StartProgressDownloadProgress { bytes_written, bytes_total }),
    })
}

fn started(error: Option<&str>) -> vpn::StartResponse {
    vpn::StartResponse { success: error.is_none(), error_message: error.unwrap_or_default().into(), ext: None }
}

fn stopped() -> vpn::StopResponse {
    vpn::StopResponse { success: true, ..Default::default() }
}

fn applied(error: Option<&str>) -> manager_message::Msg {
    manager_message::Msg::NetworkSettings(vpn::NetworkSettingsResponse {
        success: error.is_none(),
        error_message: error.unwrap_or_default().into(),
    })
}

fn router(mtu: u32) -> tunnel_message::Msg {
    tunnel_message::Msg::NetworkSettings(vpn::NetworkSettingsRequest {
        mtu,
        ipv6_settings: Some(settings::IPv6Settings {
            addrs: vec!["fd60:627a:a42b:4d5e:8f90:1122:3344:5566".into()],
            prefix_lengths: vec![128],
            included_routes: vec![settings::i_pv6_settings::IPv6Route {
                destination: "fd60:627a:a42b::".into(),
                prefix_length: 48,
                router: String::new(),
            }],
            ..Default::default()
        }),
        ..Default::default()
    })
}

fn dns(server: Option<&str>) -> tunnel_message::Msg {
    tunnel_message::Msg::NetworkSettings(vpn::NetworkSettingsRequest {
        dns_settings: Some(settings::DnsSettings {
            servers: server.map(str::to_owned).into_iter().collect(),
            domain_name: "coder".into(),
            match_domains: server.map(|_| "coder".to_owned()).into_iter().collect(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

#[test]
fn all_vectors_of_9_2() {
    use client_message::Msg as C;
    use manager_message::Msg as M;
    use service_message::Msg as S;
    use tunnel_message::Msg as T;
    use vpn::StartProgressStage::{Downloading, Finalizing, Initializing};
    use vpn::status::Lifecycle::{Started, Starting, Stopped, Stopping};

    let mut vectors = vectors();
    assert_eq!(vectors.len(), 39);
    let none = vpn::PeerUpdate::default;

    let mut manager = |name: &str, message: vpn::ManagerMessage| {
        check(name, &vectors.remove(name).unwrap(), &message);
    };
    let start = vpn::StartRequest {
        tunnel_file_descriptor: 5,
        coder_url: "https://coder.example.com".into(),
        api_token: TOKEN.into(),
        headers: vec![vpn::start_request::Header { name: "X-Proxy-Auth".into(), value: "s3cret".into() }],
        device_id: "dev-1234".into(),
        device_os: "Linux".into(),
        coder_desktop_version: "0.1.0".into(),
    };
    let odd_start = vpn::StartRequest { tunnel_file_descriptor: -1, ..Default::default() };
    manager("M1", rpc::request(id(1), M::Start(start)));
    manager("M2", rpc::request(id(2), M::GetPeerUpdate(vpn::GetPeerUpdate {})));
    manager("M3", rpc::reply(id(1), applied(None)));
    manager("M4", rpc::reply(id(2), applied(Some("denied"))));
    manager("M5", rpc::request(id(3), M::Wake(vpn::WakeRequest {})));
    manager("M6", rpc::request(id(4), M::Stop(vpn::StopRequest {})));
    manager("M7", rpc::request(id(300), M::GetPeerUpdate(vpn::GetPeerUpdate {})));
    manager("M8", rpc::request(id(1), M::Start(odd_start)));
    manager("M9", rpc::reply(id(2), applied(None)));

    let mut tunnel = |name: &str, message: vpn::TunnelMessage| {
        check(name, &vectors.remove(name).unwrap(), &message);
    };
    tunnel("T1", rpc::reply(id(1), T::Start(started(None))));
    tunnel("T2", rpc::reply(id(1), T::Start(started(Some("missing api token")))));
    tunnel("T3", rpc::one_way(T::PeerUpdate(peers(agent()))));
    tunnel("T4", rpc::one_way(T::PeerUpdate(peers(fresh_agent()))));
    let tick = vpn::PeerUpdate { upserted_agents: vec![agent()], ..Default::default() };
    tunnel("T5", rpc::one_way(T::PeerUpdate(tick)));
    let deletion = vpn::PeerUpdate {
        deleted_workspaces: vec![workspace(vpn::workspace::Status::Deleted)],
        deleted_agents: vec![bare_agent()],
        ..Default::default()
    };
    tunnel("T6", rpc::one_way(T::PeerUpdate(deletion)));
    tunnel("T7", rpc::reply(id(2), T::PeerUpdate(none())));
    let log = vpn::Log {
        level: vpn::log::Level::Info.into(),
        message: "tunnel up".into(),
        logger_names: vec!["vpn".into(), "net".into()],
        fields: vec![vpn::log::Field { name: "mtu".into(), value: "1280".into() }],
    };
    tunnel("T8", rpc::one_way(T::Log(log)));
    tunnel("T9", rpc::request(id(1), router(1280)));
    tunnel("T9u", rpc::request(id(1), router(0)));
    tunnel("T10", rpc::request(id(2), dns(Some("fd60:627a:a42b::53"))));
    tunnel("T10u", rpc::request(id(2), dns(None)));
    tunnel("T11", rpc::reply(id(3), T::Wake(vpn::WakeResponse {})));
    tunnel("T12", rpc::reply(id(4), T::Stop(stopped())));

    let mut client = |name: &str, message: vpn::ClientMessage| {
        check(name, &vectors.remove(name).unwrap(), &message);
    };
    let start = vpn::StartRequest {
        coder_url: "https://coder.example.com/".into(),
        api_token: TOKEN.into(),
        ..Default::default()
    };
    client("C1", rpc::request(id(1), C::Status(vpn::StatusRequest {})));
    client("C2", rpc::request(id(2), C::Start(start)));
    client("C3", rpc::request(id(3), C::Stop(vpn::StopRequest {})));

    let mut service = |name: &str, message: vpn::ServiceMessage| {
        check(name, &vectors.remove(name).unwrap(), &message);
    };
    let download = |written, total| progress(Downloading, Some((written, total)));
    service("S1", rpc::reply(id(1), status(Stopped, none())));
    service("S2", rpc::one_way(progress(Initializing, None)));
    service("S3", rpc::one_way(status(Starting, none())));
    service("S4", rpc::one_way(download(1_048_576, Some(67_108_864))));
    service("S5", rpc::one_way(progress(Finalizing, None)));
    service("S6", rpc::one_way(status(Started, none())));
    service("S7", rpc::reply(id(2), S::Start(started(None))));
    service("S8", rpc::one_way(status(Started, peers(agent()))));
    service("S9", rpc::reply(id(3), S::Stop(stopped())));
    service("S10", rpc::one_way(download(4096, None)));
    service("S11", rpc::one_way(status(Stopping, none())));
    service("S12", rpc::one_way(status(Stopped, none())));
    service("S13", rpc::reply(id(2), S::Start(started(Some("invalid token")))));

    assert!(vectors.is_empty(), "not checked: {:?}", vectors.keys());
}

#[test]
fn all_vectors_in_one_stream_one_byte_at_a_time() {
    let vectors = vectors();
    let stream: Vec<u8> = vectors.values().flatten().copied().collect();
    let expected: Vec<Vec<u8>> = vectors.values().map(|frame| frame[4..].to_vec()).collect();
    assert_eq!(bodies(&stream, 1), expected);
}

fn sorted<M: Message>(frame: &str) -> Inbound<M::Body> {
    let bodies = bodies(&unhex(frame), 1);
    rpc::sort(frame::decode::<M>(&bodies[0]).unwrap())
}

#[test]
fn frames_of_9_3_that_must_not_end_the_connection() {
    type Sorted = Inbound<manager_message::Msg>;
    // X0: an empty frame is handed out as such.
    assert_eq!(bodies(&unhex("0000000000000000"), 1), [vec![], vec![]]);
    let x1: Sorted = sorted::<vpn::ManagerMessage>("000000040a001200");
    assert_eq!(x1, Inbound::Ignored(Ignored::NotOneWay(Kind::GetPeerUpdate)));
    let x2: Sorted = sorted::<vpn::ManagerMessage>("000000060a0208097a00");
    assert_eq!(x2, Inbound::Ignored(Ignored::UnknownRequest(id(9))));
    let x3: Sorted = sorted::<vpn::ManagerMessage>("000000040a020809");
    assert_eq!(x3, Inbound::Ignored(Ignored::UnknownRequest(id(9))));
    let x4: Sorted = sorted::<vpn::ManagerMessage>("0000000a0a04080910011a020801");
    assert_eq!(x4, Inbound::Reply(id(1), Some(applied(None))));
    let nothing: Sorted = sorted::<vpn::ManagerMessage>("000000027a00");
    assert_eq!(nothing, Inbound::Ignored(Ignored::UnknownOneWay));
    // an empty reply is one that says "not supported".
    let empty: Sorted = sorted::<vpn::ManagerMessage>("000000040a021003");
    assert_eq!(empty, Inbound::Reply(id(3), None));
    let log = sorted::<vpn::TunnelMessage>("000000060a0208091200");
    assert_eq!(log, Inbound::Ignored(Ignored::NotARequest(id(9), Kind::Log)));
}

#[test]
fn frames_of_9_3_that_must_end_the_connection() {
    for (name, frame) in [("X5", "0000000a0a02080122041202fffe"), ("X9", "0000000608ffffffffff")] {
        let bodies = bodies(&unhex(frame), 1);
        assert!(matches!(frame::decode::<vpn::ManagerMessage>(&bodies[0]), Err(FrameError::Undecodable(_))), "{name}");
    }

    let mut x6 = Decoder::new(MAX_BODY);
    x6.feed(&unhex("01000001"));
    assert_eq!(x6.next_body(), Err(FrameError::TooLarge { length: 16_777_217, limit: MAX_BODY }));
    let mut two_gib = Decoder::new(usize::MAX);
    two_gib.feed(&unhex("80000000"));
    assert!(matches!(two_gib.next_body(), Err(FrameError::TooLarge { .. })));

    for (name, bytes) in [("X7", "01000000"), ("X8", "000000060a02"), ("half", "0000")] {
        let mut decoder = Decoder::new(MAX_BODY);
        decoder.feed(&unhex(bytes));
        assert_eq!(decoder.next_body(), Ok(None), "{name}");
        assert_eq!(decoder.finish(), Err(FrameError::Truncated), "{name}");
    }
}

#[test]
fn a_body_exactly_at_the_limit_is_read_and_written() {
    let mut message: vpn::TunnelMessage =
        rpc::one_way(tunnel_message::Msg::Log(vpn::Log { message: "x".repeat(MAX_BODY - 10), ..Default::default() }));
    let frame = frame::encode(&message, MAX_BODY).unwrap();
    assert_eq!(frame.len(), MAX_BODY + 4);
    assert_eq!(bodies(&frame, 1 << 16).len(), 1);

    if let Some(tunnel_message::Msg::Log(log)) = &mut message.msg {
        log.message.push('x');
    }
    assert_eq!(frame::encode(&message, MAX_BODY), Err(frame::EncodeError::TooLarge { length: MAX_BODY + 1 }));
    assert!(frame::encode(&message, usize::MAX).is_err());
}

#[test]
fn r21_nothing_empty_is_ever_encoded() {
    let empty = vpn::ManagerMessage::default();
    assert_eq!(frame::encode(&empty, MAX_BODY), Err(frame::EncodeError::NoBody));
    let unset = vpn::ManagerMessage { rpc: Some(vpn::Rpc { msg_id: 1, response_to: 0 }), msg: None };
    assert_eq!(frame::encode(&unset, MAX_BODY), Err(frame::EncodeError::NoBody));
}

#[test]
fn the_extension_is_invisible_to_those_who_do_not_know_it() {
    use codervpn_proto::ext;
    use prost::Message as _;

    let with = vpn::Status {
        lifecycle: vpn::status::Lifecycle::Started.into(),
        error_message: String::new(),
        peer_update: Some(vpn::PeerUpdate::default()),
        ext: Some(ext::StatusExt { revision: 1, ..Default::default() }),
    };
    let without = vpn::Status { ext: None, ..with.clone() };
    let bytes = with.encode_to_vec();
    // Field 1000, length-delimited, behind all fields of the original.
    assert_eq!(bytes, [without.encode_to_vec(), unhex("c23e020801")].concat());

    let ping = client_message::Msg::Ext(ext::ClientExt {
        request: Some(ext::client_ext::Request::Ping(ext::PingRequest::default())),
    });
    assert_eq!(ping.kind(), Kind::Ping);
    let failed = service_message::Msg::Ext(ext::ServiceExt {
        reply: Some(ext::service_ext::Reply::Failed(ext::Failure::default())),
    });
    assert!(failed.answers(Kind::Ping) && failed.answers(Kind::UnknownExt));
    assert!(!failed.answers(Kind::Start));
}

#[test]
fn a_recorded_session_decodes_and_encodes_to_the_same_bytes() {
    let mut frames = 0;
    let mut updates = 0;
    for line in include_str!("data/session.txt").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [from @ ("manager" | "tunnel"), kind, hex] = words[..] else {
            assert!(line.starts_with('#'), "{line}");
            continue;
        };
        if kind == "header" {
            continue;
        }
        let frame = unhex(hex);
        let bodies = bodies(&frame, 1);
        frames += 1;
        if from == "manager" {
            let message = frame::decode::<vpn::ManagerMessage>(&bodies[0]).unwrap();
            assert_eq!(frame::encode(&message, MAX_BODY).unwrap(), frame, "{line}");
            assert!(!matches!(rpc::sort(message), Inbound::Ignored(_)), "{line}");
        } else {
            let message = frame::decode::<vpn::TunnelMessage>(&bodies[0]).unwrap();
            assert_eq!(frame::encode(&message, MAX_BODY).unwrap(), frame, "{line}");
            let sorted = rpc::sort(message);
            assert!(!matches!(sorted, Inbound::Ignored(_)), "{line}");
            if let Inbound::OneWay(tunnel_message::Msg::PeerUpdate(_)) = sorted {
                updates += 1;
            }
        }
    }
    assert_eq!((frames, updates), (203, 26));
}
