//! The byte vectors of the deployment's protocol, protobuf only: built here field
//! by field, compared with the bytes, decoded again.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

use std::collections::BTreeMap;
use std::fmt::Debug;

use codervpn_proto::tailnet::{
    self, CoordinateRequest, CoordinateResponse, DerpMap, Node, RefreshResumeTokenResponse, WorkspaceUpdate,
    WorkspaceUpdatesRequest, coordinate_request as request, coordinate_response as response, derp_map,
};
use prost::Message;
use prost_types::{Duration, Timestamp};

const OWNER: &str = "00112233445566778899aabbccddeeff";
const WORKSPACE: &str = "11111111222233334444555555555555";
const AGENT: &str = "aaaaaaaabbbbccccddddeeeeeeeeeeee";

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// Vectors not checked yet.
struct Vectors(BTreeMap<&'static str, Vec<u8>>);

impl Vectors {
    fn check<M: Message + Default + PartialEq + Debug>(&mut self, name: &str, expected: &M) {
        let bytes = self.0.remove(name).unwrap();
        assert_eq!(expected.encode_to_vec(), bytes, "encoding of {name}");
        assert_eq!(&M::decode(&bytes[..]).unwrap(), expected, "{name}");
        // PB-1: whatever newer servers add is skipped.
        let newer = [&bytes[..], &unhex("c23e0208017a0161")].concat();
        if name != "pb_stun_off" {
            assert_eq!(&M::decode(&newer[..]).unwrap(), expected, "{name}");
        }
        // No cut panics.
        for end in 0..bytes.len() {
            let _ = M::decode(&bytes[..end]);
        }
    }
}

fn node(id: i64, first: u8, derp: &[(&str, f64)], address: &str, endpoints: &[&str]) -> Node {
    let key = [b"np".to_vec(), (first..first + 0x20).collect()].concat();
    let disco: String = (first + 0x20..first + 0x40).map(|byte| format!("{byte:02x}")).collect();
    Node {
        id,
        as_of: Some(Timestamp { seconds: 1_704_164_645, nanos: 678_901_000 }),
        key,
        disco: format!("discokey:{disco}"),
        preferred_derp: 999,
        derp_latency: derp.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect(),
        derp_forced_websocket: BTreeMap::new(),
        addresses: vec![address.to_owned()],
        allowed_ips: vec![address.to_owned()],
        endpoints: endpoints.iter().map(|e| (*e).to_owned()).collect(),
    }
}

fn update(node: Option<Node>, kind: response::peer_update::Kind, reason: &str) -> CoordinateResponse {
    CoordinateResponse {
        peer_updates: vec![response::PeerUpdate { id: unhex(AGENT), node, kind: kind.into(), reason: reason.into() }],
        error: String::new(),
    }
}

fn error(text: &str) -> CoordinateResponse {
    CoordinateResponse { error: text.into(), ..Default::default() }
}

fn workspace(status: tailnet::workspace::Status) -> tailnet::Workspace {
    tailnet::Workspace { id: unhex(WORKSPACE), name: "dev".into(), status: status.into() }
}

fn agent() -> tailnet::Agent {
    tailnet::Agent { id: unhex(AGENT), name: "main".into(), workspace_id: unhex(WORKSPACE) }
}

#[test]
fn all_protobuf_vectors_of_control_plane_9() {
    use response::peer_update::Kind;

    let mut vectors = Vectors(
        include_str!("data/tailnet.txt")
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once(' '))
            .map(|(name, hex)| (name, unhex(hex)))
            .collect(),
    );
    assert_eq!(vectors.0.len(), 17);

    vectors.check("pb_wsreq", &WorkspaceUpdatesRequest { workspace_owner_id: unhex(OWNER) });
    vectors.check(
        "pb_wsupd",
        &WorkspaceUpdate {
            upserted_workspaces: vec![workspace(tailnet::workspace::Status::Running)],
            upserted_agents: vec![agent()],
            ..Default::default()
        },
    );
    vectors.check(
        "pb_wsdel",
        &WorkspaceUpdate {
            upserted_workspaces: vec![workspace(tailnet::workspace::Status::Stopped)],
            deleted_agents: vec![agent()],
            ..Default::default()
        },
    );

    let tunnel = request::Tunnel { id: unhex(AGENT) };
    vectors.check("pb_add", &CoordinateRequest { add_tunnel: Some(tunnel.clone()), ..Default::default() });
    vectors.check("pb_rem", &CoordinateRequest { remove_tunnel: Some(tunnel), ..Default::default() });
    let ours = node(
        1_311_768_467_294_899_695,
        0,
        &[("999-v4", 0.025)],
        "fd60:627a:a42b:4708:890a:b0c:d0e:f10/128",
        &["203.0.113.7:41641", "192.168.1.10:41641"],
    );
    vectors.check("pb_node", &ours);
    vectors.check(
        "pb_upd",
        &CoordinateRequest { update_self: Some(request::UpdateSelf { node: Some(ours) }), ..Default::default() },
    );
    vectors.check(
        "pb_rfh",
        &CoordinateRequest {
            ready_for_handshake: vec![request::ReadyForHandshake { id: unhex(OWNER) }],
            ..Default::default()
        },
    );
    vectors.check("pb_disc", &CoordinateRequest { disconnect: Some(request::Disconnect {}), ..Default::default() });

    let theirs = node(2_459_547_111_496_159_506, 0x40, &[], "fd60:627a:a42b:cccc:dddd:eeee:eeee:eeee/128", &[]);
    vectors.check("pb_peer", &update(Some(theirs), Kind::Node, "add tunnel"));
    vectors.check("pb_rdy", &update(None, Kind::ReadyForHandshake, ""));
    vectors.check("pb_lost", &update(None, Kind::Lost, "lost"));
    vectors.check("pb_cerr", &error("peer ID overwritten by new connection"));
    vectors.check(
        "pb_rfherr",
        &error(
            "ready for handshake error: you do not share a tunnel with \
             \"00112233-4455-6677-8899-aabbccddeeff\"",
        ),
    );

    vectors.check(
        "pb_rt",
        &RefreshResumeTokenResponse {
            token: "tok.en.sig".into(),
            refresh_in: Some(Duration { seconds: 43_200, nanos: 0 }),
            expires_at: Some(Timestamp { seconds: 1_704_251_045, nanos: 0 }),
        },
    );

    let relay = derp_map::Region {
        region_id: 999,
        embedded_relay: true,
        region_code: "coder".into(),
        region_name: "Coder Embedded Relay".into(),
        avoid: false,
        nodes: vec![derp_map::region::Node {
            name: "999a".into(),
            region_id: 999,
            host_name: "coder.example.com".into(),
            derp_port: 443,
            ..Default::default()
        }],
    };
    let stun = derp_map::Region {
        region_id: 1000,
        region_code: "coder_stun_1000".into(),
        region_name: "Coder STUN 1000".into(),
        nodes: vec![derp_map::region::Node {
            name: "1000stun0".into(),
            region_id: 1000,
            host_name: "stun.example.com".into(),
            stun_port: 19302,
            stun_only: true,
            ..Default::default()
        }],
        ..Default::default()
    };
    vectors.check(
        "pb_dm",
        &DerpMap {
            // PB-10: present though empty.
            home_params: Some(derp_map::HomeParams::default()),
            regions: BTreeMap::from([(999, relay), (1000, stun)]),
        },
    );
    vectors.check("pb_stun_off", &derp_map::region::Node { name: "n".into(), stun_port: -1, ..Default::default() });

    assert!(vectors.0.is_empty(), "not checked: {:?}", vectors.0.keys());
}

/// PB-1 and PB-4: an unknown enum number is kept and read as the zero value.
#[test]
fn newer_servers_are_understood() {
    let kind = CoordinateResponse::decode(&unhex("0a021863")[..]).unwrap();
    let [update] = &kind.peer_updates[..] else { panic!("{kind:?}") };
    assert_eq!(update.kind, 99);
    assert_eq!(update.kind(), response::peer_update::Kind::Unspecified);
    assert_eq!(WorkspaceUpdate::decode(&[][..]).unwrap(), WorkspaceUpdate::default());
    assert_eq!(DerpMap::decode(&[][..]).unwrap().home_params, None);
}
