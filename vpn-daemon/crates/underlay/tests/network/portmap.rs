//! Port mapping against a small gateway of ours on loopback that speaks PCP, NAT-PMP and UPnP, as told.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use codervpn_underlay::{Dialer, DialerConfig, MapTarget, MapperOptions, PortMapper};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::time::timeout;

const EXTERNAL: Ipv4Addr = Ipv4Addr::new(8, 8, 4, 4);
const OWN: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// What the gateway speaks, and what it was asked.
#[derive(Default)]
struct Ways {
    pcp: bool,
    pmp: bool,
    upnp: bool,
    /// Answers carry another nonce than asked for.
    lies: bool,
    asked: Vec<&'static str>,
}

struct Gateway {
    options: MapperOptions,
    ways: Arc<Mutex<Ways>>,
}

impl Gateway {
    async fn start(ways: Ways) -> Gateway {
        let ways = Arc::new(Mutex::new(ways));
        let pcp = UdpSocket::bind((OWN, 0)).await.unwrap();
        let ssdp = UdpSocket::bind((OWN, 0)).await.unwrap();
        let http = TcpListener::bind((OWN, 0)).await.unwrap();
        let options = MapperOptions {
            allow_private: false,
            port: pcp.local_addr().unwrap().port(),
            ssdp_port: ssdp.local_addr().unwrap().port(),
        };
        let location = http.local_addr().unwrap();
        tokio::spawn(serve_pcp(pcp, Arc::clone(&ways)));
        tokio::spawn(serve_ssdp(ssdp, Arc::clone(&ways), location));
        tokio::spawn(serve_http(http, Arc::clone(&ways)));
        Gateway { options, ways }
    }

    fn asked(&self) -> Vec<&'static str> {
        self.ways.lock().unwrap().asked.clone()
    }

    fn mapper(&self) -> PortMapper {
        PortMapper::spawn(Dialer::new(DialerConfig::default()).unwrap(), self.options)
    }
}

async fn serve_pcp(socket: UdpSocket, ways: Arc<Mutex<Ways>>) {
    let mut buffer = [0; 128];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        let request = buffer[..length].to_vec();
        let answer = {
            let mut ways = ways.lock().unwrap();
            match (request[0], length) {
                (2, 60) if ways.pcp => {
                    ways.asked.push(if request[4..8] == [0; 4] { "pcp release" } else { "pcp" });
                    let mut answer = request;
                    answer[1] = 0x81;
                    answer[42..44].copy_from_slice(&5000_u16.to_be_bytes());
                    answer[44..60].copy_from_slice(&EXTERNAL.to_ipv6_mapped().octets());
                    answer[24] ^= u8::from(ways.lies);
                    Some(answer)
                }
                (0, 2) if ways.pmp => {
                    let mut answer = vec![0, 128, 0, 0, 0, 0, 0, 1];
                    answer.extend_from_slice(&EXTERNAL.octets());
                    Some(answer)
                }
                (0, 12) if ways.pmp => {
                    ways.asked.push(if request[8..12] == [0; 4] { "pmp release" } else { "pmp" });
                    let mut answer = vec![0, 129, 0, 0, 0, 0, 0, 1];
                    answer.extend_from_slice(&request[4..6]);
                    answer.extend_from_slice(&6000_u16.to_be_bytes());
                    answer.extend_from_slice(&request[8..12]);
                    Some(answer)
                }
                _ => None,
            }
        };
        if let Some(answer) = answer {
            socket.send_to(&answer, from).await.unwrap();
        }
    }
}

async fn serve_ssdp(socket: UdpSocket, ways: Arc<Mutex<Ways>>, location: SocketAddr) {
    let mut buffer = [0; 1024];
    loop {
        let (_, from) = socket.recv_from(&mut buffer).await.unwrap();
        let speaks = ways.lock().unwrap().upnp;
        if speaks {
            let answer = format!("HTTP/1.1 200 OK\r\nLOCATION: http://{location}/root.xml\r\n\r\n");
            socket.send_to(answer.as_bytes(), from).await.unwrap();
        }
    }
}

async fn serve_http(listener: TcpListener, ways: Arc<Mutex<Ways>>) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = String::new();
        let mut buffer = [0; 4096];
        // Head and body of our requests come in one or two pieces and end with the envelope.
        while !(request.starts_with("GET") && request.contains("\r\n\r\n") || request.ends_with("Envelope>")) {
            let length = stream.read(&mut buffer).await.unwrap();
            assert!(length > 0, "{request}");
            request.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        assert!(!request.to_lowercase().contains("coder-session-token"));
        let body = if request.starts_with("GET") {
            "<root><serviceList><service><serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>\
             <controlURL>/ctl</controlURL></service></serviceList></root>"
                .to_owned()
        } else if request.contains("GetExternalIPAddress") {
            format!("<NewExternalIPAddress>{EXTERNAL}</NewExternalIPAddress>")
        } else {
            let what = if request.contains("DeletePortMapping") { "upnp release" } else { "upnp" };
            ways.lock().unwrap().asked.push(what);
            "<ok/>".to_owned()
        };
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
}

fn target() -> Option<MapTarget> {
    Some(MapTarget { gateway: OWN, own: OWN, port: 41641 })
}

async fn mapped(mapper: &mut PortMapper) -> Option<SocketAddr> {
    timeout(Duration::from_secs(6), mapper.changed()).await.expect("a mapping")
}

#[tokio::test]
async fn each_protocol_maps_and_takes_back_what_it_mapped() {
    let cases = [
        (Ways { pcp: true, pmp: true, upnp: true, ..Ways::default() }, "8.8.4.4:5000", ["pcp", "pcp release"]),
        (Ways { pmp: true, upnp: true, ..Ways::default() }, "8.8.4.4:6000", ["pmp", "pmp release"]),
        (Ways { upnp: true, ..Ways::default() }, "8.8.4.4:41641", ["upnp", "upnp release"]),
    ];
    for (ways, external, asked) in cases {
        let gateway = Gateway::start(ways).await;
        let mut mapper = gateway.mapper();
        mapper.set_target(target());
        assert_eq!(mapped(&mut mapper).await, Some(external.parse().unwrap()));
        mapper.close().await;
        assert_eq!(gateway.asked(), asked);
    }
}

#[tokio::test]
async fn t37_an_answer_with_another_nonce_is_none_and_the_next_protocol_is_asked() {
    let gateway = Gateway::start(Ways { pcp: true, lies: true, pmp: true, ..Ways::default() }).await;
    let mut mapper = gateway.mapper();
    mapper.set_target(target());
    assert_eq!(mapped(&mut mapper).await, Some("8.8.4.4:6000".parse().unwrap()));
}

#[tokio::test]
async fn t54_without_a_target_the_gateway_hears_nothing_and_afterwards_nothing_more() {
    let gateway = Gateway::start(Ways { pcp: true, ..Ways::default() }).await;
    let mut mapper = gateway.mapper();
    assert!(timeout(Duration::from_millis(300), mapper.changed()).await.is_err());
    assert!(gateway.asked().is_empty());
    mapper.set_target(target());
    assert!(mapped(&mut mapper).await.is_some());
    mapper.set_target(None);
    assert_eq!(mapped(&mut mapper).await, None);
    assert_eq!(gateway.asked(), ["pcp", "pcp release"]);
}

#[tokio::test]
async fn another_port_gets_another_mapping() {
    let gateway = Gateway::start(Ways { upnp: true, ..Ways::default() }).await;
    let mut mapper = gateway.mapper();
    mapper.set_target(target());
    assert_eq!(mapped(&mut mapper).await, Some("8.8.4.4:41641".parse().unwrap()));
    mapper.set_target(Some(MapTarget { port: 999, ..target().unwrap() }));
    // The old one is taken back before or after the new one is made; the end counts.
    let asked = timeout(Duration::from_secs(6), async {
        while gateway.asked().len() < 3 {
            mapper.changed().await;
        }
        gateway.asked()
    });
    let asked = asked.await.expect("mapped again");
    assert_eq!(asked.iter().filter(|what| **what == "upnp").count(), 2, "{asked:?}");
}
