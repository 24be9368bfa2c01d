//! The `resolved` back end against a service of our own that is strict about every signature, on a
//! real message bus.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test program: its helpers are tests, too")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use codervpn_host::dns::resolved::Resolved;
use codervpn_host::dns::{Backend as _, DnsConfig, Error, State};
use codervpn_host::routes::Prefix;
use common::bus::PrivateBus;
use common::skip;
use futures_util::StreamExt as _;
use zbus::{Message, Variant};

mod common;

const INDEX: i32 = 42;
const REVERSE: &str = "b.2.4.a.a.7.2.6.0.6.d.f.ip6.arpa";

fn config() -> DnsConfig {
    DnsConfig {
        interface_index: INDEX as u32,
        server: "fd60:627a:a42b::53".parse().unwrap(),
        suffixes: vec!["coder".to_owned()],
        reverse_zone: REVERSE.to_owned(),
        search: false,
        tunnel_prefix: Prefix::new("fd60:627a:a42b::".parse().unwrap(), 48),
    }
}

fn our_address() -> Vec<u8> {
    config().server.octets().to_vec()
}

/// How the service behaves.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Manner {
    #[default]
    Current,
    /// systemd 239: neither SetLinkDNSEx nor SetLinkDefaultRoute.
    Old,
    /// systemd-networkd has the link.
    Busy,
    /// No polkit and not root.
    Refusing,
    /// Only the optional settings fail.
    Stubborn,
    /// Takes calls and never answers.
    Silent,
}

/// What the link was told.
#[derive(Debug, Default)]
struct Link {
    manner: Manner,
    calls: Vec<String>,
    servers: Vec<(i32, Vec<u8>)>,
    domains: Vec<(String, bool)>,
    no: Vec<String>,
    default_route: Option<bool>,
}

type Shared = Arc<Mutex<Link>>;

/// Serves until the test ends.
async fn serve(bus: &PrivateBus, link: Shared) {
    let connection = zbus::connection::Builder::address(bus.address.as_str()).build().await.unwrap();
    let mut messages = zbus::MessageStream::from(&connection);
    connection.request_name("org.freedesktop.resolve1").await.unwrap();
    tokio::spawn(async move {
        while let Some(Ok(message)) = messages.next().await {
            if message.message_type() == zbus::message::Type::MethodCall {
                answer(&connection, &message, &link).await;
            }
        }
    });
}

async fn answer(connection: &zbus::Connection, message: &Message, link: &Shared) {
    let header = message.header();
    let member = header.member().unwrap().to_string();
    let interface = header.interface().unwrap().to_string();
    let body = message.body();
    let signature = body.signature().to_string_no_parens();
    let manner = {
        let mut link = link.lock().unwrap();
        link.calls.push(member.clone());
        link.manner
    };
    let fail = async |name: &str| {
        connection.reply_error(&header, name, &"as told").await.unwrap();
    };
    const UNKNOWN: &str = "org.freedesktop.DBus.Error.UnknownMethod";
    match manner {
        Manner::Silent => return,
        Manner::Busy => return fail("org.freedesktop.resolve1.LinkBusy").await,
        Manner::Refusing => {
            return fail("org.freedesktop.DBus.Error.InteractiveAuthorizationRequired").await;
        }
        Manner::Old if matches!(&*member, "SetLinkDNSEx" | "SetLinkDefaultRoute") => {
            return fail(UNKNOWN).await;
        }
        Manner::Stubborn if header.signature().to_string_no_parens() == "is" => {
            return fail("org.freedesktop.DBus.Error.InvalidArgs").await;
        }
        _ => {}
    }
    if interface == "org.freedesktop.DBus.Properties" {
        assert_eq!((&*member, &*signature), ("Get", "ss"));
        assert_eq!(header.path().unwrap(), "/org/freedesktop/resolve1/link/_342");
        let (of, name): (String, String) = body.deserialize().unwrap();
        assert_eq!(of, "org.freedesktop.resolve1.Link");
        let value = {
            let link = link.lock().unwrap();
            match &*name {
                "DNS" => Variant::from(link.servers.clone()),
                "Domains" => Variant::from(link.domains.clone()),
                other => panic!("property {other}"),
            }
        };
        connection.reply(&header, &value).await.unwrap();
        return;
    }
    assert_eq!(interface, "org.freedesktop.resolve1.Manager");
    assert_eq!(header.path().unwrap(), "/org/freedesktop/resolve1");
    let index = match (&*member, &*signature) {
        ("SetLinkDNSEx", "ia(iayqs)") => {
            type Ex = (i32, Vec<u8>, u16, String);
            let (index, servers): (i32, Vec<Ex>) = body.deserialize().unwrap();
            let mut link = link.lock().unwrap();
            link.servers.clear();
            for (family, address, port, name) in servers {
                assert_eq!((port, &*name), (0, ""));
                link.servers.push((family, address));
            }
            index
        }
        ("SetLinkDNS", "ia(iay)") => {
            let (index, servers) = body.deserialize().unwrap();
            link.lock().unwrap().servers = servers;
            index
        }
        ("SetLinkDomains", "ia(sb)") => {
            let (index, domains) = body.deserialize().unwrap();
            link.lock().unwrap().domains = domains;
            index
        }
        ("SetLinkDefaultRoute", "ib") => {
            let (index, route) = body.deserialize().unwrap();
            link.lock().unwrap().default_route = Some(route);
            index
        }
        ("SetLinkLLMNR" | "SetLinkMulticastDNS" | "SetLinkDNSSEC" | "SetLinkDNSOverTLS", "is") => {
            let (index, value): (i32, String) = body.deserialize().unwrap();
            assert_eq!(value, "no");
            link.lock().unwrap().no.push(member.clone());
            index
        }
        ("FlushCaches", "") => INDEX,
        ("RevertLink", "i") => {
            let index: i32 = body.deserialize().unwrap();
            *link.lock().unwrap() = Link::default();
            index
        }
        ("GetLink", "i") => {
            let index: i32 = body.deserialize().unwrap();
            assert_eq!(index, INDEX);
            let path = zbus::ObjectPath::try_from("/org/freedesktop/resolve1/link/_342").unwrap();
            connection.reply(&header, &path).await.unwrap();
            return;
        }
        other => panic!("called {other:?}"),
    };
    assert_eq!(index, INDEX);
    connection.reply(&header, &()).await.unwrap();
}

/// Bus, service and back end; `None` where there is no dbus-daemon.
async fn setting(manner: Manner) -> Option<(tempfile::TempDir, PrivateBus, Shared, Resolved)> {
    let folder = tempfile::tempdir().unwrap();
    let Some(bus) = PrivateBus::start(folder.path()) else {
        skip("no dbus-daemon here");
        return None;
    };
    let link = Shared::default();
    link.lock().unwrap().manner = manner;
    serve(&bus, Arc::clone(&link)).await;
    let backend = Resolved::at(bus.address.clone());
    Some((folder, bus, link, backend))
}

#[tokio::test]
async fn the_link_gets_our_server_and_routing_only_domains() {
    let Some((_folder, _bus, link, mut backend)) = setting(Manner::Current).await else {
        return;
    };
    backend.apply(&config()).await.unwrap();
    assert_eq!(backend.state(), State::Applied);
    {
        let link = link.lock().unwrap();
        assert_eq!(link.servers, [(10, our_address())]);
        assert_eq!(link.domains, [("coder".to_owned(), true), (REVERSE.to_owned(), true)]);
        assert_eq!(link.default_route, Some(false));
        assert_eq!(link.no.len(), 4);
        // The order of 2.2.
        assert_eq!(link.calls[..3], ["SetLinkDNSEx", "SetLinkDomains", "SetLinkDefaultRoute"]);
        assert_eq!(link.calls.last().unwrap(), "FlushCaches");
    }
    assert_eq!(backend.check().await.unwrap(), State::Applied);
    assert!(backend.upstreams().is_empty());
    backend.revert().await.unwrap();
    assert!(link.lock().unwrap().servers.is_empty());
    assert_eq!(backend.state(), State::Off);
    backend.revert().await.unwrap();
}

#[tokio::test]
async fn with_search_only_our_suffix_searches() {
    let Some((_folder, _bus, link, mut backend)) = setting(Manner::Current).await else {
        return;
    };
    let config = DnsConfig { search: true, ..config() };
    backend.apply(&config).await.unwrap();
    assert_eq!(link.lock().unwrap().domains, [("coder".to_owned(), false), (REVERSE.to_owned(), true)]);
    assert_eq!(backend.check().await.unwrap(), State::Applied);
}

// D-09: settings that got lost come back.
#[tokio::test]
async fn lost_settings_are_set_again() {
    let Some((_folder, _bus, link, mut backend)) = setting(Manner::Current).await else {
        return;
    };
    backend.apply(&config()).await.unwrap();
    link.lock().unwrap().domains.clear();
    assert_eq!(backend.check().await.unwrap(), State::Repaired);
    assert_eq!(link.lock().unwrap().domains.len(), 2);
    link.lock().unwrap().servers = vec![(2, vec![192, 0, 2, 1])];
    assert_eq!(backend.check().await.unwrap(), State::Repaired);
    assert_eq!(link.lock().unwrap().servers, [(10, our_address())]);
    assert_eq!(backend.check().await.unwrap(), State::Applied);
}

#[tokio::test]
async fn old_and_stubborn_services_do() {
    for manner in [Manner::Old, Manner::Stubborn] {
        let Some((_folder, _bus, link, mut backend)) = setting(manner).await else {
            return;
        };
        backend.apply(&config()).await.unwrap();
        let link = link.lock().unwrap();
        assert_eq!(link.servers, [(10, our_address())], "{manner:?}");
        assert_eq!(link.domains.len(), 2);
        assert_eq!(link.calls.last().unwrap(), "FlushCaches");
    }
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    for (manner, text) in [(Manner::Busy, "Unmanaged=yes"), (Manner::Refusing, "run codervpnd as root")] {
        let Some((_folder, _bus, _link, mut backend)) = setting(manner).await else {
            return;
        };
        let error = backend.apply(&config()).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

// D-11: neither a silent service nor a stopped bus holds up start and stop.
#[tokio::test]
async fn silence_costs_seconds_not_minutes() {
    let Some((_folder, bus, _link, mut backend)) = setting(Manner::Silent).await else {
        return;
    };
    let before = Instant::now();
    let error = backend.apply(&config()).await.unwrap_err();
    assert!(matches!(error, Error::ResolvedTimeout(_)), "{error}");
    assert!(backend.revert().await.is_err());
    assert!(before.elapsed() < Duration::from_secs(5));

    let pid = rustix::process::Pid::from_raw(bus.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let mut backend = Resolved::at(bus.address.clone());
    let before = Instant::now();
    assert!(backend.apply(&config()).await.is_err());
    assert!(backend.revert().await.is_err());
    assert!(before.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_machine_without_bus_is_told_so() {
    let mut backend = Resolved::at("unix:path=/nonexistent/bus");
    let error = backend.apply(&config()).await.unwrap_err();
    assert!(error.to_string().contains("connect to the system bus"), "{error}");
}
