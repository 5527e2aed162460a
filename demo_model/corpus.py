#!/usr/bin/env python3
"""Deterministic generator of the demo model's training corpus and test items.

Everything here is written by us: word lists, templates and small grammars.
No text is copied from anywhere.  The same seed always gives the same corpus.

Skills
------
story_en, story_zh   tiny stories (several plots, coherent characters)
facts_en, facts_zh   capitals, animal sounds, colours, calendar, opposites,
                     plurals, sizes
arith                + - x, comparison of decimals (with traps such as 9.11 / 9.9)
word_problem         two and three step word problems, worked out (EN and ZH)
chain                "start with 7, add 5, double it, ..." worked out
translate            English <-> Chinese from one shared grammar
choice               four-option questions from the facts and the arithmetic
explain              one-sentence explanations of concepts (EN and ZH)
lists                counting, sorting, repeating, reversing, listing
chat                 greetings and "what are you" questions

A document is either plain text or a conversation; in training text it reads

    User: <question>\n\nAssistant: <answer><eos>

Held-out items
--------------
Each item has a key naming its content (operands, sentence, characters ...) and
not its wording.  bucket(key) is a hash in 0..31.  Buckets 0, 1 and 2 never
enter the training corpus: 0 feeds quality_suite.json, 2 feeds the evaluation at
the end of train.py and 1 is a reserve.  Closed facts (a capital has only one
answer) are in training by nature; what is held out for them is the combination
in which multiple-choice questions ask for them.

Usage
-----
    python corpus.py --docs 20 --show           look at some documents
    python corpus.py --docs 100000 --out c.jsonl
    python corpus.py --suite quality_suite.json --bucket 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from dataclasses import dataclass

HELD_OUT_BUCKETS = (0, 1, 2)  # never in the training corpus
SUITE_BUCKET, RESERVE_BUCKET, EVAL_BUCKET = 0, 1, 2


def bucket(key: str) -> int:
    """A stable hash of an item's content, 0..31."""
    return hashlib.sha256(("demo-model:" + key).encode()).digest()[0] % 32


@dataclass
class Item:
    """One question with its answer, or one plain text (then q is '')."""

    skill: str
    key: str  # '' for closed facts: never held out
    q: str
    a: str
    check: str = ""  # regular expression an answer must match; default: exact answer

    def pattern(self) -> str:
        return self.check or r"^\s*" + re.escape(self.a) + r"\s*$"


# --------------------------------------------------------------------------
# Closed facts
# --------------------------------------------------------------------------

# country, capital, country in Chinese, capital in Chinese, continent
COUNTRIES = [
    tuple(line.split("|"))
    for line in """\
France|Paris|法国|巴黎|Europe
Germany|Berlin|德国|柏林|Europe
Italy|Rome|意大利|罗马|Europe
Spain|Madrid|西班牙|马德里|Europe
Portugal|Lisbon|葡萄牙|里斯本|Europe
the United Kingdom|London|英国|伦敦|Europe
Ireland|Dublin|爱尔兰|都柏林|Europe
the Netherlands|Amsterdam|荷兰|阿姆斯特丹|Europe
Belgium|Brussels|比利时|布鲁塞尔|Europe
Switzerland|Bern|瑞士|伯尔尼|Europe
Austria|Vienna|奥地利|维也纳|Europe
Poland|Warsaw|波兰|华沙|Europe
Hungary|Budapest|匈牙利|布达佩斯|Europe
Greece|Athens|希腊|雅典|Europe
Sweden|Stockholm|瑞典|斯德哥尔摩|Europe
Norway|Oslo|挪威|奥斯陆|Europe
Denmark|Copenhagen|丹麦|哥本哈根|Europe
Finland|Helsinki|芬兰|赫尔辛基|Europe
Iceland|Reykjavik|冰岛|雷克雅未克|Europe
Ukraine|Kyiv|乌克兰|基辅|Europe
Romania|Bucharest|罗马尼亚|布加勒斯特|Europe
Bulgaria|Sofia|保加利亚|索非亚|Europe
Serbia|Belgrade|塞尔维亚|贝尔格莱德|Europe
Croatia|Zagreb|克罗地亚|萨格勒布|Europe
Czechia|Prague|捷克|布拉格|Europe
Russia|Moscow|俄罗斯|莫斯科|Europe
China|Beijing|中国|北京|Asia
Japan|Tokyo|日本|东京|Asia
South Korea|Seoul|韩国|首尔|Asia
Mongolia|Ulaanbaatar|蒙古|乌兰巴托|Asia
India|New Delhi|印度|新德里|Asia
Pakistan|Islamabad|巴基斯坦|伊斯兰堡|Asia
Nepal|Kathmandu|尼泊尔|加德满都|Asia
Thailand|Bangkok|泰国|曼谷|Asia
Vietnam|Hanoi|越南|河内|Asia
Cambodia|Phnom Penh|柬埔寨|金边|Asia
Malaysia|Kuala Lumpur|马来西亚|吉隆坡|Asia
Indonesia|Jakarta|印度尼西亚|雅加达|Asia
the Philippines|Manila|菲律宾|马尼拉|Asia
Turkey|Ankara|土耳其|安卡拉|Asia
Iran|Tehran|伊朗|德黑兰|Asia
Iraq|Baghdad|伊拉克|巴格达|Asia
Saudi Arabia|Riyadh|沙特阿拉伯|利雅得|Asia
Egypt|Cairo|埃及|开罗|Africa
Morocco|Rabat|摩洛哥|拉巴特|Africa
Kenya|Nairobi|肯尼亚|内罗毕|Africa
Ethiopia|Addis Ababa|埃塞俄比亚|亚的斯亚贝巴|Africa
Nigeria|Abuja|尼日利亚|阿布贾|Africa
Ghana|Accra|加纳|阿克拉|Africa
Senegal|Dakar|塞内加尔|达喀尔|Africa
Canada|Ottawa|加拿大|渥太华|North America
the United States|Washington|美国|华盛顿|North America
Mexico|Mexico City|墨西哥|墨西哥城|North America
Cuba|Havana|古巴|哈瓦那|North America
Brazil|Brasilia|巴西|巴西利亚|South America
Argentina|Buenos Aires|阿根廷|布宜诺斯艾利斯|South America
Chile|Santiago|智利|圣地亚哥|South America
Peru|Lima|秘鲁|利马|South America
Colombia|Bogota|哥伦比亚|波哥大|South America
Uruguay|Montevideo|乌拉圭|蒙得维的亚|South America
Australia|Canberra|澳大利亚|堪培拉|Oceania
New Zealand|Wellington|新西兰|惠灵顿|Oceania""".splitlines()
]

# animal, verb (third person), Chinese name, Chinese sound
SOUNDS = [
    tuple(line.split("|"))
    for line in """\
dog|barks|狗|汪汪
cat|meows|猫|喵喵
cow|moos|牛|哞哞
sheep|baas|羊|咩咩
duck|quacks|鸭子|嘎嘎
pig|oinks|猪|哼哼
horse|neighs|马|咴咴
lion|roars|狮子|吼吼
frog|croaks|青蛙|呱呱
rooster|crows|公鸡|喔喔
hen|clucks|母鸡|咯咯
bee|buzzes|蜜蜂|嗡嗡
bird|chirps|小鸟|叽叽
mouse|squeaks|老鼠|吱吱
snake|hisses|蛇|嘶嘶
owl|hoots|猫头鹰|咕咕
wolf|howls|狼|嗷嗷""".splitlines()
]

# thing (with article as it stands in a sentence), verb, colour, Chinese thing, Chinese colour
COLOURS = [
    tuple(line.split("|"))
    for line in """\
grass|is|green|草|绿色
the clear sky|is|blue|晴朗的天空|蓝色
snow|is|white|雪|白色
coal|is|black|煤|黑色
a ripe banana|is|yellow|熟香蕉|黄色
a ripe tomato|is|red|熟番茄|红色
a carrot|is|orange|胡萝卜|橙色
chocolate|is|brown|巧克力|棕色
a strawberry|is|red|草莓|红色
a lemon|is|yellow|柠檬|黄色
a leaf in spring|is|green|春天的树叶|绿色
milk|is|white|牛奶|白色
the night sky|is|black|夜空|黑色
the sea|is|blue|大海|蓝色
an elephant|is|grey|大象|灰色
a flamingo|is|pink|火烈鸟|粉色
an eggplant|is|purple|茄子|紫色
a frog|is|green|青蛙|绿色
salt|is|white|盐|白色
a crow|is|black|乌鸦|黑色
a pumpkin|is|orange|南瓜|橙色
blood|is|red|血|红色""".splitlines()
]
COLOUR_NAMES = ["green", "blue", "white", "black", "yellow", "red", "orange", "brown", "grey", "pink", "purple"]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
DAYS_ZH = ["星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MONTHS_ZH = ["一月", "二月", "三月", "四月", "五月", "六月", "七月", "八月", "九月", "十月", "十一月", "十二月"]

OPPOSITES = [
    tuple(line.split("|"))
    for line in """\
hot|cold|热|冷
big|small|大|小
tall|short|高|矮
fast|slow|快|慢
new|old|新|旧
happy|sad|高兴|难过
light|dark|亮|暗
heavy|light|重|轻
open|closed|开|关
full|empty|满|空
wet|dry|湿|干
hard|soft|硬|软
early|late|早|晚
near|far|近|远
strong|weak|强|弱
rich|poor|富|穷
up|down|上|下
left|right|左|右
inside|outside|里|外
clean|dirty|干净|脏
loud|quiet|吵|安静
thick|thin|厚|薄
long|short|长|短
first|last|第一|最后
day|night|白天|黑夜
good|bad|好|坏
easy|difficult|容易|困难
brave|afraid|勇敢|害怕
true|false|真|假
buy|sell|买|卖""".splitlines()
]
OPPOSITES_AMBIGUOUS = {"light"}  # stands in two pairs

PLURALS = [
    tuple(w.split("/"))
    for w in [
        "cat/cats",
        "dog/dogs",
        "book/books",
        "apple/apples",
        "tree/trees",
        "car/cars",
        "pen/pens",
        "bird/birds",
        "box/boxes",
        "bus/buses",
        "fox/foxes",
        "dish/dishes",
        "watch/watches",
        "glass/glasses",
        "peach/peaches",
        "brush/brushes",
        "baby/babies",
        "city/cities",
        "story/stories",
        "cherry/cherries",
        "lady/ladies",
        "party/parties",
        "puppy/puppies",
        "leaf/leaves",
        "knife/knives",
        "wolf/wolves",
        "shelf/shelves",
        "half/halves",
        "child/children",
        "man/men",
        "woman/women",
        "foot/feet",
        "tooth/teeth",
        "goose/geese",
        "mouse/mice",
        "sheep/sheep",
        "fish/fish",
        "deer/deer",
        "ox/oxen",
        "person/people",
        "potato/potatoes",
        "tomato/tomatoes",
        "hero/heroes",
        "toy/toys",
        "key/keys",
        "day/days",
        "boy/boys",
        "monkey/monkeys",
        "chair/chairs",
        "table/tables",
        "flower/flowers",
        "kite/kites",
        "stone/stones",
        "river/rivers",
        "house/houses",
        "horse/horses",
        "cup/cups",
        "spoon/spoons",
        "hat/hats",
        "shoe/shoes",
    ]
]

# from small to big
SIZES = [
    tuple(line.split("|"))
    for line in """\
an ant|蚂蚁
a bee|蜜蜂
a mouse|老鼠
a rabbit|兔子
a cat|猫
a sheep|羊
a lion|狮子
a horse|马
an elephant|大象
a whale|鲸鱼""".splitlines()
]

WORDS = [
    tuple(line.split("|"))
    for line in """\
apple|苹果
banana|香蕉
water|水
book|书
pen|笔
dog|狗
cat|猫
bird|鸟
fish|鱼
sun|太阳
moon|月亮
star|星星
tree|树
flower|花
house|房子
school|学校
friend|朋友
teacher|老师
student|学生
mother|妈妈
father|爸爸
milk|牛奶
bread|面包
rice|米饭
tea|茶
car|汽车
river|河
mountain|山
sea|大海
rain|雨
snow|雪
wind|风
door|门
window|窗户
table|桌子
chair|椅子
red|红色
blue|蓝色
green|绿色
white|白色
black|黑色
yellow|黄色
today|今天
tomorrow|明天
morning|早上
evening|晚上
hello|你好
thank you|谢谢
goodbye|再见""".splitlines()
]


def cap(s: str) -> str:
    return s[0].upper() + s[1:]


def an(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def facts_en(r: random.Random) -> Item:
    kind = r.randrange(12)
    if kind <= 3:
        country, capital, *_ = r.choice(COUNTRIES)
        form = r.randrange(4)
        if form == 0:
            q, a = f"What is the capital of {country}?", f"The capital of {country} is {capital}."
        elif form == 1:
            q, a = f"Which city is the capital of {country}?", f"{capital} is the capital of {country}."
        elif form == 2:
            q, a = f"{capital} is the capital of which country?", f"{capital} is the capital of {country}."
        else:
            q, a = f"Name the capital of {country}.", f"{capital}."
    elif kind == 4:
        country, _, _, _, continent = r.choice(COUNTRIES)
        q, a = f"On which continent is {country}?", f"{cap(country)} is in {continent}."
    elif kind == 5:
        animal, verb, *_ = r.choice(SOUNDS)
        q, a = r.choice(
            [
                (f"What sound does {an(animal)} make?", f"{cap(an(animal))} {verb}."),
                (f"Which animal {verb}?", f"{cap(an(animal))} {verb}."),
            ]
        )
    elif kind == 6:
        thing, verb, colour, *_ = r.choice(COLOURS)
        q, a = r.choice(
            [
                (f"What colour {verb} {thing}?", f"{cap(thing)} {verb} {colour}."),
                (f"Which colour does {thing} have?", f"{cap(thing)} {verb} {colour}."),
            ]
        )
    elif kind == 7:
        names = r.choice([DAYS, MONTHS])
        i, n = r.randrange(len(names)), len(names)
        unit = "day" if names is DAYS else "month"
        form = r.randrange(3)
        if form == 0:
            q, a = f"Which {unit} comes after {names[i]}?", f"{names[(i + 1) % n]} comes after {names[i]}."
        elif form == 1:
            q, a = f"Which {unit} comes before {names[i]}?", f"{names[(i - 1) % n]} comes before {names[i]}."
        elif names is DAYS:
            q, a = "How many days are in a week?", "There are 7 days in a week."
        else:
            q, a = "How many months are in a year?", "There are 12 months in a year."
    elif kind == 8:
        x, y, *_ = r.choice(OPPOSITES)
        if r.random() < 0.5 and y not in ("light", "short", "closed"):
            x, y = y, x
        if x in OPPOSITES_AMBIGUOUS or x == "short":
            x, y = "hot", "cold"
        q, a = r.choice(
            [
                (f"What is the opposite of {x}?", f"The opposite of {x} is {y}."),
                (f'Give the opposite of the word "{x}".', f"{cap(y)}."),
            ]
        )
    elif kind == 9:
        s, p = r.choice(PLURALS)
        q, a = r.choice(
            [
                (f"What is the plural of {s}?", f"The plural of {s} is {p}."),
                (f"Write the plural: one {s}, two ...", f"One {s}, two {p}."),
            ]
        )
    elif kind == 10:
        i, j = r.sample(range(len(SIZES)), 2)
        big, small = SIZES[max(i, j)][0], SIZES[min(i, j)][0]
        x, y = SIZES[i][0], SIZES[j][0]
        q, a = r.choice(
            [
                (f"Which is bigger, {x} or {y}?", f"{cap(big)} is bigger than {small}."),
                (f"Which is smaller, {x} or {y}?", f"{cap(small)} is smaller than {big}."),
            ]
        )
    else:
        en, zh = r.choice(WORDS)
        q, a = r.choice(
            [
                (f'What is "{en}" in Chinese?', f'"{cap(en)}" is {zh} in Chinese.'),
                (f"What does {zh} mean in English?", f'{zh} means "{en}".'),
            ]
        )
    return Item("facts_en", "", q, a)


def facts_zh(r: random.Random) -> Item:
    kind = r.randrange(10)
    if kind <= 3:
        _, _, country, capital, _ = r.choice(COUNTRIES)
        q, a = r.choice(
            [
                (f"{country}的首都是哪里？", f"{country}的首都是{capital}。"),
                (f"哪个城市是{country}的首都？", f"{capital}是{country}的首都。"),
                (f"{capital}是哪个国家的首都？", f"{capital}是{country}的首都。"),
            ]
        )
    elif kind == 4:
        _, _, animal, sound = r.choice(SOUNDS)
        q, a = f"{animal}怎么叫？", f"{animal}{sound}叫。"
    elif kind == 5:
        _, _, _, thing, colour = r.choice(COLOURS)
        q, a = f"{thing}是什么颜色的？", f"{thing}是{colour}的。"
    elif kind == 6:
        names = r.choice([DAYS_ZH, MONTHS_ZH])
        i, n = r.randrange(len(names)), len(names)
        unit = "哪一天" if names is DAYS_ZH else "哪个月"
        q, a = r.choice(
            [
                (f"{names[i]}之后是{unit}？", f"{names[i]}之后是{names[(i + 1) % n]}。"),
                (f"{names[i]}之前是{unit}？", f"{names[i]}之前是{names[(i - 1) % n]}。"),
            ]
        )
    elif kind == 7:
        _, _, x, y = r.choice(OPPOSITES)
        if r.random() < 0.5:
            x, y = y, x
        q, a = f"“{x}”的反义词是什么？", f"“{x}”的反义词是“{y}”。"
    elif kind == 8:
        i, j = r.sample(range(len(SIZES)), 2)
        big, small = SIZES[max(i, j)][1], SIZES[min(i, j)][1]
        x, y = SIZES[i][1], SIZES[j][1]
        q, a = r.choice(
            [(f"{x}和{y}，哪个更大？", f"{big}比{small}大。"), (f"{x}和{y}，哪个更小？", f"{small}比{big}小。")]
        )
    else:
        en, zh = r.choice(WORDS)
        q, a = r.choice(
            [(f"“{zh}”用英语怎么说？", f"“{zh}”用英语说是 {en}。"), (f"{en} 是什么意思？", f"{en} 的意思是“{zh}”。")]
        )
    return Item("facts_zh", "", q, a)


# --------------------------------------------------------------------------
# Arithmetic
# --------------------------------------------------------------------------


def decimal_pair(r: random.Random) -> tuple[str, str]:
    """Two different decimals; half of them with the same whole part and unequal length."""
    while True:
        w = r.randrange(0, 20)
        form = r.randrange(4)
        if form == 0:  # trap: 9.11 against 9.9
            x, y = f"{w}.{r.randrange(1, 10)}{r.randrange(1, 10)}", f"{w}.{r.randrange(1, 10)}"
        elif form == 1:
            x, y = f"{w}.{r.randrange(1, 10)}", f"{w}.{r.randrange(1, 10)}"
        elif form == 2:
            x, y = f"{w}.{r.randrange(1, 10)}", f"{r.randrange(0, 20)}.{r.randrange(1, 10)}{r.randrange(1, 10)}"
        else:
            x, y = f"{w}.{r.randrange(0, 10)}{r.randrange(1, 10)}", f"{w}.{r.randrange(0, 10)}{r.randrange(1, 10)}"
        if float(x) != float(y):
            return (x, y) if r.random() < 0.5 else (y, x)


def compare_reason(x: str, y: str) -> str:
    """Why the larger of two decimals is the larger, digit by digit."""
    (wx, fx), (wy, fy) = x.split("."), y.split(".")
    n = max(len(fx), len(fy))
    fx, fy = fx.ljust(n, "0"), fy.ljust(n, "0")
    big = x if float(x) > float(y) else y
    if wx != wy:
        hi, lo = max(int(wx), int(wy)), min(int(wx), int(wy))
        return f"The whole parts differ: {hi} > {lo}. So {big} is larger."
    if fx[0] != fy[0]:
        hi, lo = max(fx[0], fy[0]), min(fx[0], fy[0])
        return f"The whole parts are equal. Tenths: {hi} > {lo}. So {big} is larger."
    hi, lo = max(fx[1], fy[1]), min(fx[1], fy[1])
    return f"The whole parts and tenths are equal. Hundredths: {hi} > {lo}. So {big} is larger."


def arith(r: random.Random) -> Item:
    kind = r.randrange(8)
    if kind <= 2:
        x, y = r.randrange(100), r.randrange(100)
        v, sym, verb, zh = x + y, "+", "plus", "加"
        key = f"add:{x}:{y}"
    elif kind <= 5:
        x, y = r.randrange(100), r.randrange(100)
        if x < y and r.random() < 0.85:
            x, y = y, x
        v, sym, verb, zh = x - y, "-", "minus", "减"
        key = f"sub:{x}:{y}"
    elif kind == 6:
        x, y = r.randrange(13), r.randrange(13)
        v, sym, verb, zh = x * y, "*", "times", "乘"
        key = ""  # the tables are closed facts
    else:
        x, y = decimal_pair(r)
        key = "cmp:" + ":".join(sorted((x, y)))
        big, small = (x, y) if float(x) > float(y) else (y, x)
        form = r.randrange(5)
        if form == 0:
            q, a, chk = f"Which is larger, {x} or {y}?", compare_reason(x, y), rf"{re.escape(big)} is larger\.\s*$"
        elif form == 1:
            q, a, chk = (
                f"Which number is bigger: {x} or {y}?",
                compare_reason(x, y),
                rf"{re.escape(big)} is larger\.\s*$",
            )
        elif form == 2:
            q, a, chk = f"Which is smaller, {x} or {y}?", f"{small} < {big}, so {small} is smaller.", ""
        elif form == 3:
            q, a, chk = f"{x} 和 {y} 哪个更大？", f"{big} > {small}，所以 {big} 更大。", ""
        else:
            q, a, chk = f"Is {x} greater than {y}?", (f"Yes, {x} > {y}." if big == x else f"No, {x} < {y}."), ""
        return Item("arith", key, q, a, chk)
    form = r.randrange(9)
    s = "×" if sym == "*" and form in (1, 4, 7) else sym
    if form == 0:
        q, a = f"{x}{sym}{y}=?", f"{v}"
    elif form == 1:
        q, a = f"{x} {s} {y} = ?", f"{v}"
    elif form == 2:
        q, a = f"What is {x} {verb} {y}?", f"{x} {verb} {y} is {v}."
    elif form == 3:
        q, a = f"What is {x} {sym} {y}?", f"{x} {sym} {y} = {v}."
    elif form == 4:
        q, a = f"Calculate {x} {s} {y}.", f"{x} {s} {y} = {v}."
    elif form == 5:
        q, a = f"{x}{zh}{y}等于几？", f"{x}{zh}{y}等于{v}。"
    elif form == 6:
        q, a = f"计算：{x}{sym}{y}", f"{x}{sym}{y}={v}"
    elif form == 7:
        q, a = f"Compute {x}{s}{y}", f"{v}"
    else:
        q, a = (
            {"+": f"Add {x} and {y}.", "-": f"Subtract {y} from {x}.", "*": f"Multiply {x} by {y}."}[sym],
            f"{x} {sym} {y} = {v}.",
        )
    return Item("arith", key, q, a)


NAMES_M = ["Tom", "Ben", "Sam", "Leo", "Max", "Jack", "Noah", "Finn", "Hugo", "Omar", "Paul", "Eric"]
NAMES_F = ["Ann", "Lily", "Mia", "Zoe", "Ella", "Nora", "Ruby", "Rosa", "Ivy", "Kate", "Emma", "Lucy"]
THINGS = [
    "apples",
    "pears",
    "books",
    "pencils",
    "stamps",
    "marbles",
    "shells",
    "cookies",
    "stickers",
    "coins",
    "flowers",
    "cards",
    "balloons",
    "eggs",
    "stones",
]
NAMES_ZH = ["小明", "小红", "小华", "小丽", "小刚", "小雨", "小林", "小芳"]
THINGS_ZH = [
    ("苹果", "个"),
    ("梨", "个"),
    ("书", "本"),
    ("铅笔", "支"),
    ("邮票", "张"),
    ("糖", "块"),
    ("花", "朵"),
    ("气球", "个"),
    ("鸡蛋", "个"),
    ("贝壳", "个"),
]


def word_problem(r: random.Random) -> Item:
    if r.random() < 0.25:
        return word_problem_zh(r)
    female = r.random() < 0.5
    name = r.choice(NAMES_F if female else NAMES_M)
    he = "she" if female else "he"
    He = cap(he)
    friend = r.choice([n for n in NAMES_M + NAMES_F if n != name])
    things = r.choice(THINGS)
    kind = r.randrange(5)
    if kind == 0:  # start, two or three changes
        start = r.randrange(3, 40)
        v, parts, steps, key = (
            start,
            [f"{name} has {start} {things}."],
            [f"{name} starts with {start}."],
            f"wp0:{start}",
        )
        for _ in range(r.choice([2, 2, 3])):
            if r.random() < 0.5 and v > 2:
                d = r.randrange(1, min(v, 20))
                parts.append(r.choice([f"{He} gives {d} to {friend}.", f"{He} loses {d}.", f"{He} sells {d}."]))
                steps.append(f"{v} - {d} = {v - d}.")
                v -= d
                key += f"-{d}"
            else:
                d = r.randrange(1, 20)
                parts.append(
                    r.choice(
                        [
                            f"{He} buys {d} more.",
                            f"{He} finds {d} more.",
                            f"{friend} gives {he if he == 'she' else 'him'} {d} more.".replace(
                                "gives she", "gives her"
                            ),
                        ]
                    )
                )
                steps.append(f"{v} + {d} = {v + d}.")
                v += d
                key += f"+{d}"
        parts.append(f"How many {things} does {name} have now?")
    elif kind == 1:  # boxes with k each, then a change
        b, k = r.randrange(2, 10), r.randrange(2, 10)
        d = r.randrange(1, 15)
        more = r.random() < 0.5 or d >= b * k
        parts = [f"{name} has {b} boxes with {k} {things} in each box."]
        steps = [f"{b} * {k} = {b * k}."]
        if more:
            parts.append(f"{He} gets {d} more {things}.")
            steps.append(f"{b * k} + {d} = {b * k + d}.")
            v = b * k + d
        else:
            parts.append(f"{He} gives away {d} {things}.")
            steps.append(f"{b * k} - {d} = {b * k - d}.")
            v = b * k - d
        parts.append(f"How many {things} does {name} have?")
        key = f"wp1:{b}:{k}:{d}:{more}"
    elif kind == 2:  # cost and change
        n, p = r.randrange(2, 9), r.randrange(2, 9)
        money = n * p + r.randrange(1, 30)
        v = money - n * p
        parts = [
            f"One of the {things} costs {p} dollars.",
            f"{name} buys {n} of them and had {money} dollars.",
            f"How many dollars does {he} have left?",
        ]
        steps = [f"{n} * {p} = {n * p}.", f"{money} - {n * p} = {v}."]
        key = f"wp2:{n}:{p}:{money}"
    elif kind == 3:  # comparison and sum
        x, d = r.randrange(3, 40), r.randrange(1, 20)
        more = r.random() < 0.6 or d >= x
        y = x + d if more else x - d
        v = x + y
        parts = [
            f"{name} has {x} {things}.",
            f"{friend} has {d} {'more' if more else 'fewer'} than {name}.",
            "How many do they have together?",
        ]
        steps = [f"{friend} has {x} {'+' if more else '-'} {d} = {y}.", f"{x} + {y} = {v}."]
        key = f"wp3:{x}:{d}:{more}"
    else:  # equal sharing after adding
        n, each = r.randrange(2, 9), r.randrange(2, 10)
        total = n * each
        x = r.randrange(1, total)
        v = each
        parts = [
            f"{name} has {x} {things} and {friend} has {total - x} {things}.",
            f"They put them together and share them equally among {n} children.",
            f"How many {things} does each child get?",
        ]
        steps = [f"{x} + {total - x} = {total}.", f"{total} / {n} = {each}."]
        key = f"wp4:{n}:{each}:{x}"
    return Item(
        "word_problem", key, " ".join(parts), " ".join(steps) + f" The answer is {v}.", rf"The answer is {v}\.\s*$"
    )


def word_problem_zh(r: random.Random) -> Item:
    name, friend = r.sample(NAMES_ZH, 2)
    thing, mw = r.choice(THINGS_ZH)
    if r.random() < 0.6:
        v = r.randrange(3, 40)
        key, parts, steps = f"wpz0:{v}", [f"{name}有{v}{mw}{thing}"], []
        for _ in range(r.choice([1, 2, 2])):
            if r.random() < 0.5 and v > 2:
                d = r.randrange(1, min(v, 20))
                parts.append(r.choice([f"送给{friend}{d}{mw}", f"用掉了{d}{mw}"]))
                steps.append(f"{v}-{d}={v - d}")
                v, key = v - d, key + f"-{d}"
            else:
                d = r.randrange(1, 20)
                parts.append(r.choice([f"又买了{d}{mw}", f"又得到{d}{mw}"]))
                steps.append(f"{v}+{d}={v + d}")
                v, key = v + d, key + f"+{d}"
        q = "，".join(parts) + f"。{name}现在有几{mw}{thing}？"
    else:
        b, k, d = r.randrange(2, 10), r.randrange(2, 10), r.randrange(1, 15)
        v = b * k + d
        key = f"wpz1:{b}:{k}:{d}"
        q = f"有{b}个盒子，每个盒子里有{k}{mw}{thing}，外面还有{d}{mw}。一共有几{mw}{thing}？"
        steps = [f"{b}*{k}={b * k}", f"{b * k}+{d}={v}"]
    return Item("word_problem", key, q, "，".join(steps) + f"。答案是{v}。", rf"答案是{v}。\s*$")


def chain(r: random.Random) -> Item:
    """Several operations one after the other, worked out line by line."""
    start = v = r.randrange(1, 20)
    said, steps, key = [], [], f"chain:{start}"
    for _ in range(r.choice([3, 3, 4])):
        ops = ["add"]
        if v > 2:
            ops.append("sub")
        if v <= 12:
            ops += ["double", "times"]
        if v % 2 == 0 and v > 2:
            ops.append("halve")
        op = r.choice(ops)
        if op == "add":
            d = r.randrange(1, 15)
            said.append(f"add {d}")
            steps.append(f"{v} + {d} = {v + d}.")
            v += d
        elif op == "sub":
            d = r.randrange(1, min(v, 15))
            said.append(f"subtract {d}")
            steps.append(f"{v} - {d} = {v - d}.")
            v -= d
        elif op == "double":
            d = 2
            said.append("double it")
            steps.append(f"{v} * 2 = {v * 2}.")
            v *= 2
        elif op == "times":
            d = r.randrange(2, 6)
            said.append(f"multiply by {d}")
            steps.append(f"{v} * {d} = {v * d}.")
            v *= d
        else:
            d = 2
            said.append("halve it")
            steps.append(f"{v} / 2 = {v // 2}.")
            v //= 2
        key += f":{op}{d}"
    form = r.randrange(3)
    if form == 0:
        q = f"Start with {start}. " + " ".join(cap(s) + "." for s in said) + " What is the result?"
    elif form == 1:
        q = f"Take {start}, " + ", ".join(said[:-1]) + f", then {said[-1]}. What do you get?"
    else:
        q = f"Work step by step: start with {start}, " + ", then ".join(said) + "."
    return Item("chain", key, q, " ".join(steps) + f" The answer is {v}.", rf"The answer is {v}\.\s*$")


# --------------------------------------------------------------------------
# Translation: one grammar that makes both languages at once
# --------------------------------------------------------------------------

# English, Chinese, third person singular?
SUBJECTS = [
    ("I", "我", 0),
    ("you", "你", 0),
    ("he", "他", 1),
    ("she", "她", 1),
    ("we", "我们", 0),
    ("they", "他们", 0),
    ("my mother", "我的妈妈", 1),
    ("my father", "我的爸爸", 1),
    ("my friend", "我的朋友", 1),
    ("the teacher", "老师", 1),
    ("the students", "学生们", 0),
    ("my brother", "我的哥哥", 1),
    ("my sister", "我的姐姐", 1),
    ("the children", "孩子们", 0),
    ("the girl", "那个女孩", 1),
    ("the boy", "那个男孩", 1),
]
LIKES = [
    ("apples", "苹果"),
    ("bananas", "香蕉"),
    ("cats", "猫"),
    ("dogs", "狗"),
    ("music", "音乐"),
    ("books", "书"),
    ("tea", "茶"),
    ("milk", "牛奶"),
    ("rice", "米饭"),
    ("flowers", "花"),
    ("birds", "鸟"),
    ("stories", "故事"),
    ("bread", "面包"),
    ("fish", "鱼"),
    ("noodles", "面条"),
    ("spring", "春天"),
    ("summer", "夏天"),
]
ADJ = [
    ("happy", "高兴"),
    ("tired", "累"),
    ("busy", "忙"),
    ("hungry", "饿"),
    ("thirsty", "渴"),
    ("cold", "冷"),
    ("quiet", "安静"),
    ("strong", "强壮"),
    ("sad", "难过"),
    ("clever", "聪明"),
    ("late", "晚"),
    ("kind", "善良"),
]
NUM = [("two", "两"), ("three", "三"), ("four", "四"), ("five", "五"), ("six", "六"), ("ten", "十")]
COL = [("red", "红色"), ("blue", "蓝色"), ("green", "绿色"), ("white", "白色"), ("black", "黑色"), ("yellow", "黄色")]
# singular, plural, Chinese, measure word
NOUNS = [
    ("book", "books", "书", "本"),
    ("cat", "cats", "猫", "只"),
    ("dog", "dogs", "狗", "只"),
    ("pen", "pens", "笔", "支"),
    ("flower", "flowers", "花", "朵"),
    ("car", "cars", "汽车", "辆"),
    ("hat", "hats", "帽子", "顶"),
    ("cup", "cups", "杯子", "个"),
    ("bird", "birds", "鸟", "只"),
    ("fish", "fish", "鱼", "条"),
    ("bag", "bags", "包", "个"),
    ("chair", "chairs", "椅子", "把"),
    ("ball", "balls", "球", "个"),
    ("key", "keys", "钥匙", "把"),
]
# base, third person, Chinese
VERBS = [
    ("read a book", "reads a book", "看书"),
    ("drink tea", "drinks tea", "喝茶"),
    ("drink water", "drinks water", "喝水"),
    ("eat breakfast", "eats breakfast", "吃早饭"),
    ("play football", "plays football", "踢足球"),
    ("sing a song", "sings a song", "唱歌"),
    ("draw a picture", "draws a picture", "画画"),
    ("write a letter", "writes a letter", "写信"),
    ("learn Chinese", "learns Chinese", "学中文"),
    ("learn English", "learns English", "学英语"),
    ("run", "runs", "跑步"),
    ("swim", "swims", "游泳"),
    ("cook", "cooks", "做饭"),
    ("dance", "dances", "跳舞"),
    ("work", "works", "工作"),
    ("sleep", "sleeps", "睡觉"),
]
PLACES = [
    ("at home", "在家"),
    ("at school", "在学校"),
    ("in the park", "在公园"),
    ("by the river", "在河边"),
    ("in the garden", "在花园里"),
    ("in the library", "在图书馆"),
]
TIMES = [
    ("every day", "每天"),
    ("every morning", "每天早上"),
    ("every evening", "每天晚上"),
    ("on Sunday", "星期日"),
    ("on Monday", "星期一"),
    ("in summer", "夏天"),
    ("in winter", "冬天"),
    ("today", "今天"),
]
WHERE = [
    ("on the table", "在桌子上"),
    ("under the chair", "在椅子下面"),
    ("in the box", "在盒子里"),
    ("behind the door", "在门后面"),
    ("in the car", "在汽车里"),
    ("under the bed", "在床下面"),
    ("in the bag", "在包里"),
    ("near the window", "在窗户旁边"),
]


def be(en: str, third: int) -> str:
    return "am" if en == "I" else "is" if third else "are"


def sentence_pair(r: random.Random) -> tuple[str, str]:
    s, sz, third = r.choice(SUBJECTS)
    S = cap(s)
    kind = r.randrange(10)
    if kind == 0:
        x, xz = r.choice(LIKES)
        return f"{S} {'likes' if third else 'like'} {x}.", f"{sz}喜欢{xz}。"
    if kind == 1:
        x, xz = r.choice(ADJ)
        very = r.random() < 0.6
        return f"{S} {be(s, third)} {'very ' if very else 'not '}{x}.", f"{sz}{'很' if very else '不'}{xz}。"
    if kind == 2:
        n, nz = r.choice(NUM)
        sg, pl, z, m = r.choice(NOUNS)
        c, cz = r.choice(COL)
        if r.random() < 0.5:
            return f"{S} {'has' if third else 'have'} {n} {c} {pl}.", f"{sz}有{nz}{m}{cz}的{z}。"
        return f"{S} {'has' if third else 'have'} {n} {pl}.", f"{sz}有{nz}{m}{z}。"
    if kind in (3, 4):
        b, t3, vz = r.choice(VERBS)
        t, tz = r.choice(TIMES)
        v = t3 if third else b
        if r.random() < 0.5:
            p, pz = r.choice(PLACES)
            return f"{S} {v} {p} {t}.", f"{sz}{tz}{pz}{vz}。"
        return f"{S} {v} {t}.", f"{sz}{tz}{vz}。"
    if kind == 5:
        sg, pl, z, m = r.choice(NOUNS)
        c, cz = r.choice(COL)
        d, dz = r.choice([("This", "这"), ("That", "那")])
        return f"{d} {sg} is {c}.", f"{dz}{m}{z}是{cz}的。"
    if kind == 6:
        sg, pl, z, m = r.choice(NOUNS)
        w, wz = r.choice(WHERE)
        if r.random() < 0.3:
            return f"Where is the {sg}?", f"{z}在哪里？"
        c, cz = r.choice(COL)
        return f"The {c} {sg} is {w}.", f"{cz}的{z}{wz}。"
    if kind == 7:
        b, t3, vz = r.choice(VERBS)
        p, pz = r.choice(PLACES)
        if r.random() < 0.5:
            return f"{S} {'wants' if third else 'want'} to {b} {p}.", f"{sz}想{pz}{vz}。"
        return f"{S} {'wants' if third else 'want'} to {b}.", f"{sz}想{vz}。"
    if kind == 8:
        b, t3, vz = r.choice(VERBS)
        if r.random() < 0.5:
            return f"{S} can {b}.", f"{sz}会{vz}。"
        return f"{S} cannot {b}.", f"{sz}不会{vz}。"
    x, xz = r.choice(LIKES)
    return f"{'Does' if third else 'Do'} {s} like {x}?", f"{sz}喜欢{xz}吗？"


def translate(r: random.Random) -> Item:
    en, zh = sentence_pair(r)
    key = "tr:" + en
    if r.random() < 0.5:
        q = r.choice(
            [
                f"Translate into Chinese: {en}",
                f'How do you say "{en}" in Chinese?',
                f"把这句话翻译成中文：{en}",
                f"Translate to Chinese: {en}",
            ]
        )
        return Item("translate", key, q, zh)
    q = r.choice(
        [
            f"Translate into English: {zh}",
            f"What does this mean in English? {zh}",
            f"把这句话翻译成英文：{zh}",
            f"Translate to English: {zh}",
        ]
    )
    return Item("translate", key, q, en)


# --------------------------------------------------------------------------
# Multiple choice
# --------------------------------------------------------------------------


def choice_question(r: random.Random) -> tuple[str, str, list[str], str]:
    """(question, right answer, three wrong answers, language)"""
    kind = r.randrange(12)
    if kind <= 2:
        c = r.choice(COUNTRIES)
        wrong = r.sample([o[1] for o in COUNTRIES if o != c], 3)
        return f"What is the capital of {c[0]}?", c[1], wrong, "en"
    if kind == 3:
        c = r.choice(COUNTRIES)
        wrong = r.sample([o[3] for o in COUNTRIES if o != c], 3)
        return f"{c[2]}的首都是哪里？", c[3], wrong, "zh"
    if kind == 4:
        c = r.choice(COUNTRIES)
        wrong = [cap(o[0]) for o in r.sample([o for o in COUNTRIES if o != c], 3)]
        return f"{c[1]} is the capital of which country?", cap(c[0]), wrong, "en"
    if kind == 5:
        c = r.choice(SOUNDS)
        wrong = [cap(an(o[0])) for o in r.sample([o for o in SOUNDS if o != c], 3)]
        return f"Which animal {c[1]}?", cap(an(c[0])), wrong, "en"
    if kind == 6:
        c = r.choice(COLOURS)
        wrong = r.sample([o for o in COLOUR_NAMES if o != c[2]], 3)
        return f"What colour {c[1]} {c[0]}?", cap(c[2]), [cap(w) for w in wrong], "en"
    if kind == 7:
        names = r.choice([DAYS, MONTHS])
        i = r.randrange(len(names))
        right = names[(i + 1) % len(names)]
        wrong = r.sample([o for o in names if o not in (right, names[i])], 3)
        return f"Which {'day' if names is DAYS else 'month'} comes after {names[i]}?", right, wrong, "en"
    if kind == 8:
        pairs = [o for o in OPPOSITES if o[0] not in ("light", "tall", "long", "heavy")]
        c = r.choice(pairs)
        wrong = r.sample([o[1] for o in pairs if o != c], 3)
        return f"What is the opposite of {c[0]}?", cap(c[1]), [cap(w) for w in wrong], "en"
    if kind == 9:
        order = sorted(r.sample(range(len(SIZES)), 4))
        right = SIZES[order[-1]][0]
        return "Which of these is the biggest?", cap(right), [cap(SIZES[i][0]) for i in order[:-1]], "en"
    x, y = r.randrange(2, 60), r.randrange(2, 40)
    if r.random() < 0.5 and x > y:
        sym, v = "-", x - y
    else:
        sym, v = "+", x + y
    wrong = []
    while len(wrong) < 3:
        w = v + r.choice([-10, -3, -2, -1, 1, 2, 3, 10])
        if w >= 0 and str(w) not in wrong:
            wrong.append(str(w))
    return f"What is {x} {sym} {y}?", str(v), wrong, "en"


def choice(r: random.Random) -> Item:
    q, right, wrong, lang = choice_question(r)
    options = [right] + wrong
    r.shuffle(options)
    letter = "ABCD"[options.index(right)]
    key = f"mc:{q}:{'|'.join(options)}"
    body = q + "\n" + "\n".join(f"{l}. {o}" for l, o in zip("ABCD", options))
    if lang == "zh":
        return Item("choice", key, body + "\n请只回答字母。", letter)
    if r.random() < 0.7:
        return Item("choice", key, body + "\nAnswer with the letter only.", letter)
    return Item("choice", key, body, f"{letter}. {right}", rf"^\s*{letter}\b")


# --------------------------------------------------------------------------
# Concepts and small talk
# --------------------------------------------------------------------------

# phrase in a question, Chinese phrase, English explanations, Chinese explanations
CONCEPTS = [
    (
        "a mixture-of-experts model",
        "混合专家模型",
        [
            "A mixture-of-experts model is a neural network with many small expert networks, of which a router picks only a few for each token."
        ],
        ["混合专家模型是由许多小的专家网络组成的神经网络，路由器为每个词元只选出其中几个。"],
    ),
    (
        "an expert in a neural network",
        "神经网络中的专家",
        [
            "An expert is a small feed-forward network inside a layer that is used only for the tokens the router sends to it."
        ],
        ["专家是一层里面的小型前馈网络，只处理路由器交给它的词元。"],
    ),
    (
        "a router in a mixture-of-experts model",
        "混合专家模型中的路由器",
        ["A router is a small layer that scores all experts for a token and chooses the best few."],
        ["路由器是一个小的网络层，它给每个专家打分，并选出最合适的几个。"],
    ),
    (
        "a cache",
        "缓存",
        ["A cache is a small and fast store that keeps things you will probably need again soon."],
        ["缓存是一个又小又快的存储区，用来保存很快可能再次用到的东西。"],
    ),
    (
        "a KV cache",
        "键值缓存",
        [
            "A KV cache keeps the keys and values of earlier tokens, so that a language model does not compute them again."
        ],
        ["键值缓存保存前面词元的键和值，这样语言模型就不用重新计算它们。"],
    ),
    (
        "quantisation",
        "量化",
        ["Quantisation stores the weights of a model with fewer bits, which saves memory at a small cost in accuracy."],
        ["量化是用更少的位数保存模型的权重，可以节省内存，只损失一点点精度。"],
    ),
    (
        "a token",
        "词元",
        [
            "A token is a small piece of text, such as a word or a part of a word, that a language model reads as one unit."
        ],
        ["词元是一小段文字，比如一个词或词的一部分，语言模型把它当作一个单位来读。"],
    ),
    (
        "a language model",
        "语言模型",
        ["A language model is a program that reads text and predicts which token comes next."],
        ["语言模型是一个程序，它读入文字，并预测下一个词元是什么。"],
    ),
    (
        "attention",
        "注意力机制",
        ["Attention lets a model look back at earlier tokens and take more from those that matter."],
        ["注意力机制让模型回头看前面的词元，并从重要的词元中取得更多信息。"],
    ),
    (
        "a neural network",
        "神经网络",
        ["A neural network is a stack of simple layers whose numbers are learned from examples."],
        ["神经网络由许多简单的层叠成，其中的数字是从例子中学来的。"],
    ),
    (
        "memory bandwidth",
        "内存带宽",
        ["Memory bandwidth is the amount of data that can be moved to or from memory in one second."],
        ["内存带宽是一秒钟内能从内存读出或写入的数据量。"],
    ),
    (
        "a tokenizer",
        "分词器",
        ["A tokenizer cuts text into tokens and turns each token into a number."],
        ["分词器把文字切成词元，并把每个词元变成一个数字。"],
    ),
    (
        "a prompt",
        "提示词",
        ["A prompt is the text you give to a language model so that it can continue or answer."],
        ["提示词是你给语言模型的文字，模型根据它继续写或者回答。"],
    ),
    (
        "a GPU",
        "图形处理器",
        ["A GPU is a chip with many small cores that work on a lot of numbers at the same time."],
        ["图形处理器是一种有许多小核心的芯片，可以同时处理大量数字。"],
    ),
    (
        "a solid-state drive",
        "固态硬盘",
        ["A solid-state drive stores files in memory chips and has no moving parts."],
        ["固态硬盘把文件存放在存储芯片里，没有会动的零件。"],
    ),
]

ABOUT_EN = [
    (
        ["Who are you?", "What are you?", "Tell me about yourself.", "What is your name?", "Are you a person?"],
        "I am a tiny demo model with a few million weights. I know short stories, simple facts, small sums and easy translations.",
    ),
    (
        ["What can you do?", "How can you help me?", "What should I ask you?", "Help"],
        "I can tell short stories, answer simple facts, do small sums step by step, and translate easy sentences between English and Chinese.",
    ),
    (
        ["Hello!", "Hi!", "Hello", "Hi", "Hey there!", "Good morning!", "Good evening!", "hello", "hi"],
        "Hello! I am a tiny demo model. Ask me for a short story, a simple fact or a small sum.",
    ),
    (["Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"], "You are welcome!"),
    (["Goodbye!", "Bye!", "See you!", "Good night!"], "Goodbye! Have a nice day."),
    (["How are you?", "How are you today?", "How do you do?"], "I am fine, thank you. How can I help you?"),
]
ABOUT_ZH = [
    (
        ["你是谁？", "你是什么？", "介绍一下你自己。", "你叫什么名字？"],
        "我是一个很小的演示模型。我会讲小故事，回答简单的常识，做小的算术，也会翻译简单的句子。",
    ),
    (
        ["你会做什么？", "你能帮我做什么？", "我可以问你什么？"],
        "我会讲小故事，回答简单的常识，一步一步做算术，还会在中文和英文之间翻译简单的句子。",
    ),
    (
        ["你好！", "你好", "您好！", "早上好！", "晚上好！"],
        "你好！我是一个很小的演示模型。你可以让我讲故事、回答常识或者做算术。",
    ),
    (["谢谢！", "谢谢你！", "非常感谢！"], "不客气！"),
    (["再见！", "再见", "晚安！"], "再见！祝你今天愉快。"),
]


def explain(r: random.Random) -> Item:
    en, zh, answers, answers_zh = r.choice(CONCEPTS)
    if r.random() < 0.6:
        q = r.choice(
            [
                f"What is {en}?",
                f"Explain {en} in one sentence.",
                f"Can you explain what {en} is?",
                f"In one sentence, what is {en}?",
                f"Tell me what {en} is.",
                f"Describe {en}.",
            ]
        )
        return Item("explain", "", q, answers[0])
    q = r.choice([f"什么是{zh}？", f"用一句话解释{zh}。", f"请解释一下{zh}。", f"{zh}是什么？"])
    return Item("explain", "", q, answers_zh[0])


def chat(r: random.Random) -> Item:
    qs, a = r.choice(ABOUT_EN if r.random() < 0.65 else ABOUT_ZH)
    return Item("chat", "", r.choice(qs), a)


# --------------------------------------------------------------------------
# Lists
# --------------------------------------------------------------------------

GROUPS = {
    "fruits": ["apple", "pear", "banana", "peach", "cherry", "lemon", "orange", "plum", "grape", "mango"],
    "animals": ["dog", "cat", "horse", "cow", "sheep", "lion", "mouse", "rabbit", "duck", "frog"],
    "colours": ["red", "blue", "green", "white", "black", "yellow", "brown", "pink", "grey", "purple"],
    "tools": ["hammer", "saw", "brush", "spoon", "knife", "rope", "needle", "shovel", "ladder", "bucket"],
    "toys": ["ball", "kite", "doll", "drum", "robot", "puzzle", "train", "boat", "bear", "top"],
}
ALL_WORDS = sorted({w for g in GROUPS.values() for w in g})
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def lists(r: random.Random) -> Item:
    kind = r.randrange(10)
    if kind == 0:
        lo, n = r.randrange(0, 60), r.randrange(3, 12)
        down = r.random() < 0.3
        seq = list(range(lo, lo + n))
        if down:
            seq.reverse()
        q = r.choice(
            [
                f"Count {'down ' if down else ''}from {seq[0]} to {seq[-1]}.",
                f"List the numbers from {seq[0]} to {seq[-1]}.",
            ]
        )
        return Item("lists", f"count:{seq[0]}:{seq[-1]}", q, ", ".join(map(str, seq)))
    if kind == 1:
        xs = r.sample(range(1, 100), r.randrange(3, 7))
        down = r.random() < 0.3
        q = f"Sort these numbers from {'largest to smallest' if down else 'smallest to largest'}: {', '.join(map(str, xs))}"
        return Item("lists", f"sort:{xs}", q, ", ".join(map(str, sorted(xs, reverse=down))))
    if kind == 2:
        ws = r.sample(ALL_WORDS, r.randrange(3, 6))
        return Item("lists", f"alpha:{ws}", f"Sort these words alphabetically: {', '.join(ws)}", ", ".join(sorted(ws)))
    if kind == 3:
        w, n = r.choice(ALL_WORDS), r.randrange(2, 8)
        q = r.choice([f'Repeat the word "{w}" {n} times.', f'Say "{w}" {NUMBER_WORDS[n]} times.'])
        return Item("lists", f"repeat:{w}:{n}", q, " ".join([w] * n))
    if kind == 4:
        ws = r.sample(ALL_WORDS, r.randrange(3, 6))
        return Item("lists", f"rev:{ws}", f"Reverse this list: {', '.join(ws)}", ", ".join(reversed(ws)))
    if kind == 5:
        ws = r.sample(ALL_WORDS, r.randrange(2, 9))
        q = r.choice([f"How many words are in this list? {', '.join(ws)}", f"Count the words: {', '.join(ws)}"])
        return Item("lists", f"len:{ws}", q, f"There are {len(ws)} words.")
    if kind == 6:
        g = r.choice(list(GROUPS))
        n = r.randrange(2, 6)
        q = r.choice([f"List {NUMBER_WORDS[n]} {g}.", f"Name {n} {g}."])
        return Item("lists", "", q, ", ".join(GROUPS[g][:n]) + ".")
    if kind == 7:
        ws = r.sample(ALL_WORDS, r.randrange(3, 6))
        last = r.random() < 0.5
        q = f"What is the {'last' if last else 'first'} word in this list? {', '.join(ws)}"
        return Item("lists", f"end:{last}:{ws}", q, ws[-1] if last else ws[0])
    if kind == 8:
        xs = r.sample(range(1, 100), r.randrange(3, 6))
        big = r.random() < 0.5
        q = f"Which number is the {'largest' if big else 'smallest'}? {', '.join(map(str, xs))}"
        return Item("lists", f"ext:{big}:{xs}", q, str(max(xs) if big else min(xs)))
    lo, step = r.randrange(0, 30), r.choice([2, 3, 5, 10])
    seq = [lo + step * i for i in range(6)]
    q = f"Continue the sequence: {', '.join(map(str, seq[:4]))}, ..."
    return Item("lists", f"seq:{lo}:{step}", q, f"{seq[4]}, {seq[5]}")


# --------------------------------------------------------------------------
# English stories
# --------------------------------------------------------------------------

ANIMALS_EN = [
    "rabbit",
    "fox",
    "bear",
    "mouse",
    "duck",
    "squirrel",
    "hedgehog",
    "frog",
    "kitten",
    "puppy",
    "owl",
    "turtle",
]
PET_NAMES = ["Pip", "Momo", "Coco", "Bobo", "Nutty", "Willow", "Tuck", "Daisy", "Biscuit", "Fern", "Pepper", "Clover"]
ADJ_CHAR = ["small", "kind", "curious", "cheerful", "clever", "shy", "brave", "gentle", "young", "playful"]
PLACES_EN = [
    ("a quiet village", "the village"),
    ("a green valley", "the valley"),
    ("a small town by the sea", "the town"),
    ("a big forest", "the forest"),
    ("a farm on a hill", "the farm"),
    ("a house near the river", "the river"),
    ("a sunny meadow", "the meadow"),
    ("a little island", "the island"),
]
OBJECTS_EN = [
    "red kite",
    "blue ball",
    "silver bell",
    "wooden boat",
    "green scarf",
    "golden key",
    "yellow hat",
    "small drum",
    "paper star",
    "music box",
    "striped sock",
    "shiny shell",
]
SPOTS_EN = [
    "under the old bridge",
    "behind the big tree",
    "inside a hollow log",
    "under a pile of leaves",
    "beside the well",
    "on top of the fence",
    "between two stones",
    "under the bench",
]
FOODS_EN = ["honey cake", "warm soup", "apple pie", "berry jam", "fresh bread", "pancakes", "plum tart", "nut cookies"]
WEATHER_EN = ["sunny", "windy", "cloudy", "warm", "cool", "bright"]
FEARS_EN = [
    ("the dark", "sleep without a lamp", "the stars were like tiny lamps"),
    ("deep water", "swim across the pond", "the water held {him} up"),
    ("thunder", "stay calm in a storm", "thunder was only a loud noise"),
    ("high places", "climb the tall tree", "the view from the top was beautiful"),
    ("the big slide", "go down the big slide", "it was the best ride in the world"),
]
BUILDS_EN = [
    ("a kite", "it was too heavy to fly", "thin paper", "it rose high into the sky"),
    ("a little boat", "water came in through a hole", "warm wax", "it floated like a duck"),
    ("a birdhouse", "the roof fell off", "strong nails", "a blue bird moved in the next day"),
    ("a bridge of sticks", "it broke in the middle", "a long rope", "even the old goat could cross it"),
    ("a tower of stones", "it fell over again and again", "wide flat stones", "it stood as tall as a door"),
    ("a swing", "the rope was too short", "a longer rope", "it flew back and forth all day"),
]
SEEDS_EN = [
    ("sunflower", "a tall yellow sunflower"),
    ("pumpkin", "a round orange pumpkin"),
    ("strawberry", "sweet red strawberries"),
    ("carrot", "a row of crunchy carrots"),
    ("rose", "a pink rose"),
    ("bean", "a green bean plant"),
]
OBSTACLES_EN = [
    ("a fallen tree", "rolled it aside with a long branch"),
    ("a wide stream", "laid flat stones in the water and hopped across"),
    ("a locked gate", "found a small gap in the fence and went through"),
    ("thick fog", "followed the sound of the church bell"),
    ("a herd of sleepy cows", "waited and sang softly until the cows moved away"),
]
GOALS_EN = [
    "visit {his} grandmother",
    "see the sea",
    "bring a letter to the old baker",
    "hear the band play",
    "pick wild berries",
]


class Hero:
    """A character with a stable name, kind and pronouns."""

    def __init__(self, r: random.Random, avoid: str = ""):
        self.female = r.random() < 0.5
        self.animal = r.random() < 0.55
        pool = PET_NAMES if self.animal else NAMES_F if self.female else NAMES_M
        self.name = r.choice([n for n in pool if n != avoid])
        self.adj = r.choice(ADJ_CHAR)
        self.kind = r.choice(ANIMALS_EN) if self.animal else ("girl" if self.female else "boy")
        self.he, self.him, self.his = ("she", "her", "her") if self.female else ("he", "him", "his")

    @property
    def noun(self) -> str:
        return an(self.kind) + f" named {self.name}"

    @property
    def adjnoun(self) -> str:
        return an(f"{self.adj} {self.kind}") + f" named {self.name}"

    def fill(self, s: str) -> str:
        return s.replace("{his}", self.his).replace("{him}", self.him).replace("{he}", self.he)


def opening(r: random.Random, h: Hero, place: str) -> str:
    return r.choice(
        [
            f"Once upon a time, there was {h.adjnoun}. {cap(h.he)} lived in {place}.",
            f"In {place}, there lived {h.adjnoun}.",
            f"{h.name} was {an(h.adj + ' ' + h.kind)} who lived in {place}.",
            f"Long ago, in {place}, there was {h.adjnoun}.",
        ]
    )


def closing(r: random.Random, h: Hero, f: Hero) -> str:
    return r.choice(
        [
            f"From that day on, {h.name} and {f.name} were best friends.",
            f"{h.name} and {f.name} laughed together until the sun went down.",
            f"That night, {h.name} fell asleep with a smile.",
            f"{h.name} never forgot that day.",
            f"Then {h.name} and {f.name} walked home together, and both were happy.",
        ]
    )


def moral(r: random.Random, text: str) -> str:
    return r.choice([f"{text}", f"And so everyone learned that {text[0].lower() + text[1:]}", ""])


def story_lost(r, h, f, place, short):
    o, spot, food = r.choice(OBJECTS_EN), r.choice(SPOTS_EN), r.choice(FOODS_EN)
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"{h.name} had a {o} and loved it very much.",
                f"{cap(h.his)} favourite thing was a {o}.",
                f"{cap(h.his)} grandmother had given {h.him} a {o}.",
            ]
        ),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} morning, the {o} was gone.",
                f"One day, {h.he} could not find the {o}.",
                f"But one {r.choice(WEATHER_EN)} day, the {o} was not in its place.",
            ]
        ),
        r.choice(
            [
                f"{h.name} looked in the kitchen, in the garden and under the bed, but it was not there.",
                f"{cap(h.he)} searched everywhere and felt very sad.",
                f"{h.name} sat down and began to cry.",
            ]
        ),
        r.choice(
            [
                f'{cap(h.his)} friend {f.name}, {an(f.adj + " " + f.kind)}, came by and asked, "What is wrong?"',
                f'Then {f.name}, {an(f.adj + " " + f.kind)}, heard {h.him}. "Why are you so sad?" asked {f.name}.',
            ]
        ),
        r.choice([f'"I lost my {o}," said {h.name}.', f'"My {o} is gone," {h.name} answered.']),
        r.choice(
            [f'"Let us look for it together," said {f.name}.', f'"Do not worry. I will help you," {f.name} said.']
        ),
        r.choice(
            [
                f"They walked all over {short} and asked everyone they met.",
                f"They followed the path through {short} step by step.",
                "They looked left and right and listened to every sound.",
            ]
        ),
        f"At last, {f.name} looked {spot}, and there was the {o}!",
        r.choice([f"{h.name} jumped for joy and thanked {f.name}.", f'"Thank you, {f.name}!" cried {h.name}.']),
        r.choice([f"They went home and ate {food}.", f"To celebrate, they shared some {food}.", ""]),
        closing(r, h, f),
    ]
    return t, f"loses {h.his} {o}", f"a lost {o}", o


def story_fear(r, h, f, place, short):
    fear, goal, truth = r.choice(FEARS_EN)
    truth = h.fill(truth)
    t = [
        opening(r, h, place),
        f"{h.name} was not afraid of much, but {h.he} was afraid of {fear}.",
        r.choice(
            [
                f"All {h.his} friends could {goal}, but {h.name} could not.",
                f"{cap(h.he)} wished that {h.he} could {goal}.",
            ]
        ),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} day, {h.name} told {h.his} friend {f.name}, {an(f.adj + ' ' + f.kind)}, about it.",
                f"One evening, {h.his} friend {f.name}, {an(f.adj + ' ' + f.kind)}, asked why {h.he} was so quiet.",
            ]
        ),
        r.choice(
            [
                f'"I was afraid too," said {f.name}. "Take a deep breath and take one small step."',
                f'"Being brave means that you try even when you are afraid," said {f.name}.',
                f'{f.name} smiled and said, "I will stay right beside you."',
            ]
        ),
        r.choice(
            [
                f"So {h.name} took {f.name}'s hand and tried.",
                f"The next day, {h.name} closed {h.his} eyes, counted to three and tried.",
            ]
        ),
        r.choice(
            [
                f"The first time, {h.his} knees shook and {h.he} stopped.",
                f"It was hard at first, and {h.he} nearly gave up.",
            ]
        ),
        r.choice(['"Once more," said ' + f.name + " softly.", f"But {f.name} did not laugh and waited for {h.him}."]),
        f"Then {h.name} tried again, and this time {h.he} found that {truth}.",
        r.choice([f'"I did it!" {h.he} shouted.', f"{h.name} was so proud that {h.he} danced around {short}."]),
        r.choice([moral(r, "A small step can be very brave."), moral(r, "Friends make us strong.")]),
        closing(r, h, f),
    ]
    return t, f"is afraid of {fear}", f"being afraid of {fear}", fear


def story_build(r, h, f, place, short):
    thing, problem, fix, success = r.choice(BUILDS_EN)
    noun = thing.split(" ", 1)[1]
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} day, {h.name} wanted to build {thing}.",
                f"More than anything, {h.name} wanted to build {thing}.",
            ]
        ),
        r.choice(
            [
                f"{cap(h.he)} worked all morning with wood, glue and string.",
                f"{cap(h.he)} drew a plan and worked until noon.",
                f"{cap(h.he)} looked for everything {h.he} needed and began to work.",
            ]
        ),
        f"But when {h.he} tried the {noun}, {problem}.",
        r.choice(
            [f"{h.name} sighed and sat down on the ground.", f'"Oh no," said {h.name}.', f"{h.name} wanted to give up."]
        ),
        r.choice(
            [
                f"Just then, {f.name}, {an(f.adj + ' ' + f.kind)}, came along the path.",
                f"{cap(h.his)} neighbour {f.name}, {an(f.adj + ' ' + f.kind)}, had watched everything.",
            ]
        ),
        r.choice(
            [
                f'"You only need {fix}," said {f.name}. "I have some at home."',
                f'"It is a good start," said {f.name}. "Let us try it with {fix}."',
            ]
        ),
        r.choice([f"{f.name} ran home and came back with {fix}.", f"Together they found {fix} near {short}."]),
        r.choice(["They worked side by side and sang a song.", "This time they worked slowly and with care."]),
        f"When the {noun} was ready, {success}.",
        r.choice(
            [
                f'"We did it together," said {h.name}.',
                f"{h.name} hugged {f.name} and laughed.",
                moral(r, "Two heads are better than one."),
            ]
        ),
        closing(r, h, f),
    ]
    return t, f"builds {thing}", f"building {thing}", thing


def story_share(r, h, f, place, short):
    food, o = r.choice(FOODS_EN), r.choice(OBJECTS_EN)
    if r.random() < 0.5:
        it, quarrel, solve = (
            f"a {o}",
            f"Both wanted to play with the {o} first.",
            r.choice(
                [
                    f'"Let us take turns," said {h.name}. "You go first."',
                    f'"We can play with it together," said {h.name}. "You hold one side and I hold the other."',
                ]
            ),
        )
        topic = o
    else:
        it, quarrel, solve = (
            f"some {food}",
            f"There was not much of the {food}, and both were hungry.",
            r.choice(
                [
                    f'"Let us cut it into two equal parts," said {h.name}.',
                    f'"You cut it in two, and I will choose," said {h.name}.',
                ]
            ),
        )
        topic = food
    t = [
        opening(r, h, place),
        r.choice([f"{cap(h.his)} best friend was {f.adjnoun}.", f"Next door lived {f.adjnoun}."]),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} afternoon, they found {it} near {short}.",
                f"One {r.choice(WEATHER_EN)} day, an old woman gave them {it}.",
            ]
        ),
        quarrel,
        r.choice(
            [f'"It is mine!" said {h.name}. "No, it is mine!" said {f.name}.', f"{h.name} and {f.name} began to argue."]
        ),
        r.choice(
            ["They became so loud that the birds flew away.", "Soon both of them were angry and nobody had any fun."]
        ),
        r.choice(
            [
                f"Then {h.name} stopped and thought for a moment.",
                f"{h.name} saw a tear on {f.name}'s face and felt sorry.",
            ]
        ),
        solve,
        r.choice([f'{f.name} smiled. "That is fair," {f.he} said.', f'"That is a wonderful idea," said {f.name}.']),
        r.choice(["After that, it was twice as much fun.", "And so both of them were content."]),
        r.choice([moral(r, "Sharing makes good things better."), ""]),
        closing(r, h, f),
    ]
    return t, f"learns to share {it}", f"sharing {it}", topic


def story_garden(r, h, f, place, short):
    seed, result = r.choice(SEEDS_EN)
    food = r.choice(FOODS_EN)
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"In spring, {h.his} friend {f.name}, {an(f.adj + ' ' + f.kind)}, gave {h.him} a {seed} seed.",
                f"One day, {h.name} found a {seed} seed and showed it to {f.name}, {an(f.adj + ' ' + f.kind)}.",
            ]
        ),
        r.choice(
            [
                f"{h.name} put the seed into the earth behind the house.",
                f"{h.name} made a small hole and planted the seed.",
            ]
        ),
        f"The next morning {h.he} looked, but there was nothing to see.",
        r.choice(
            [f'"Maybe it does not like me," said {h.name}.', f"{h.name} was disappointed and wanted to dig it up."]
        ),
        r.choice(
            [
                f'"Be patient," said {f.name}. "Seeds need water, sun and time."',
                f'"Good things take time," said {f.name}. "Give it a little water every day."',
            ]
        ),
        r.choice(
            [
                f"So {h.name} watered the seed every morning.",
                f"So every day {h.name} brought a cup of water and told the seed a story.",
            ]
        ),
        r.choice(["A week passed, and then another.", "Rain came, and then the sun came back."]),
        "At last, a tiny green leaf came out of the ground.",
        f"By the end of summer, {h.name} had {result}.",
        r.choice(
            [
                f"{h.name} and {f.name} sat beside it and ate {food}.",
                f'"You were right, {f.name}," said {h.name}.',
                f"{h.name} gave the best part of it to {f.name}.",
            ]
        ),
        moral(r, "Patience brings good things."),
        closing(r, h, f),
    ]
    return t, f"plants a {seed} seed", f"a {seed} seed", seed


def story_journey(r, h, f, place, short):
    (obst, solve), goal, food = r.choice(OBSTACLES_EN), h.fill(r.choice(GOALS_EN)), r.choice(FOODS_EN)
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} morning, {h.name} set out to {goal}.",
                f"One day, {h.name} decided to {goal}.",
            ]
        ),
        r.choice(
            [
                f"{cap(h.he)} packed some {food} and put on {h.his} boots.",
                f"{cap(h.his)} bag was small, but it held some {food}.",
            ]
        ),
        r.choice(
            [
                f'On the way, {h.he} met {f.adjnoun}. "May I come with you?" asked {f.name}.',
                f"Near {short}, {h.he} met {f.adjnoun}, who wanted to come along.",
            ]
        ),
        r.choice([f'"Of course," said {h.name}, and they walked on together.', f"{h.name} was glad to have company."]),
        f"After an hour, they came to {obst}.",
        r.choice([f'"What shall we do now?" asked {f.name}.', f'"We cannot go on," said {f.name}.']),
        r.choice([f"{h.name} thought for a while.", f'"There is always a way," said {h.name}.']),
        f"Then the two friends {solve}.",
        r.choice(["Before evening, they reached the end of their way.", "Soon they arrived, tired but proud."]),
        r.choice(
            [
                f"They sat down, shared the {food} and told everyone about their adventure.",
                f"How good the {food} tasted after such a day!",
            ]
        ),
        closing(r, h, f),
    ]
    return t, f"sets out to {goal}", "a small adventure", obst


def story_gift(r, h, f, place, short):
    o, food = r.choice(OBJECTS_EN), r.choice(FOODS_EN)
    made = r.choice(
        [
            "painted a picture of the two of them",
            "wrote a little song",
            "made a crown of flowers",
            "folded ten paper birds",
            "carved a small wooden heart",
        ]
    )
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"Tomorrow was the birthday of {h.his} friend {f.name}, {an(f.adj + ' ' + f.kind)}.",
                f"{cap(h.his)} friend {f.name}, {an(f.adj + ' ' + f.kind)}, had a birthday soon.",
            ]
        ),
        r.choice(
            [
                f"{h.name} wanted to give {f.him} a {o}, but {h.he} had no money.",
                f"In a shop window, {h.name} saw a {o}, but it was too expensive.",
            ]
        ),
        r.choice([f"{h.name} walked around {short} and thought hard.", f"{h.name} could not sleep that night."]),
        r.choice(['"A gift does not have to cost money," said the old baker.', f"Then {h.he} had an idea."]),
        f"{h.name} sat down and {made}.",
        r.choice(["It took the whole evening.", "It was not perfect, but it was made with love."]),
        f"The next day, {h.name} gave it to {f.name}.",
        r.choice([f"{f.name} looked at it for a long time and smiled.", f"{cap(f.his)} eyes began to shine."]),
        r.choice(
            [
                f'"This is the best present of all," {f.he} said.',
                f'"Nobody has ever made something for me," said {f.name}.',
            ]
        ),
        r.choice([f"Then everyone ate {food} and danced.", f"There was {food} for all the guests."]),
        closing(r, h, f),
    ]
    return t, f"makes a present for {f.name}", "a birthday present", made


def story_rescue(r, h, f, place, short):
    trouble, tool, act = r.choice(
        [
            ("was stuck in the mud", "a long branch", "pulled {him} out"),
            ("had fallen into a deep hole", "a rope", "let it down and pulled {him} up"),
            ("sat high in a tree and could not come down", "a ladder", "helped {him} down step by step"),
            ("was caught in a thorny bush", "a pair of scissors", "cut the thorns one by one"),
            (
                "was sitting on a rock in the river, and the water was rising",
                "a flat piece of wood",
                "used it as a raft",
            ),
        ]
    )
    act = f.fill(act)
    food = r.choice(FOODS_EN)
    t = [
        opening(r, h, place),
        r.choice(
            [
                f"One {r.choice(WEATHER_EN)} day, {h.name} heard someone call for help.",
                f"On {h.his} way home, {h.name} heard a small voice.",
            ]
        ),
        r.choice([f"{cap(h.he)} followed the sound through {short}.", f"{cap(h.he)} ran as fast as {h.he} could."]),
        f"There {h.he} saw {f.adjnoun}, who {trouble}.",
        r.choice([f'"Please help me!" cried {f.name}.', f'"I have been here since morning," said {f.name}.']),
        r.choice([f'"Stay calm, I will come back," said {h.name}.', f'"Do not be afraid," said {h.name}.']),
        f"{h.name} looked around and found {tool}.",
        f"Then {h.he} {act}.",
        r.choice([f"{f.name} was safe at last.", f'"You saved me!" said {f.name}.']),
        r.choice(
            [
                f"{h.name} took {f.him} home and gave {f.him} {food}.",
                f"To say thank you, {f.name} brought {h.him} {food} the next day.",
            ]
        ),
        moral(r, "Helping others makes the heart warm."),
        closing(r, h, f),
    ]
    return t, f"helps {f.name}, who {trouble.split(',')[0]}", f"someone who helps {an(f.kind)}", tool


PLOTS_EN = [story_lost, story_fear, story_build, story_share, story_garden, story_journey, story_gift, story_rescue]


def story_en(r: random.Random) -> Item:
    h = Hero(r)
    f = Hero(r, avoid=h.name)
    place, short = r.choice(PLACES_EN)
    plot = r.choice(PLOTS_EN)
    parts, does, about, detail = plot(r, h, f, place, short)
    text = " ".join(p for p in parts if p)
    if r.random() < 0.3:  # two or three paragraphs
        ss = [p for p in parts if p]
        n = len(ss)
        text = "\n\n".join([" ".join(ss[: n // 2]), " ".join(ss[n // 2 :])])
    key = f"se:{plot.__name__}:{h.name}:{h.kind}:{f.name}:{detail}"
    if r.random() < 0.25:
        return Item("story_en", key, "", text)
    q = r.choice(
        [
            f"Tell me a short story about {h.noun}.",
            f"Tell me a story about {h.noun} who {does}.",
            f"Write a short story about {about}.",
            f"Write a story about {h.noun} and {f.noun}.",
            f"Tell me a story about {an(h.kind)}.",
            f"Can you tell me a story about {h.name} and {f.name}?",
            r.choice(
                [
                    "Tell me a story.",
                    "Please tell me a short story.",
                    "Write a short story for children.",
                    f"Tell me a story in {place}.",
                ]
            ),
        ]
    )
    return Item("story_en", key, q, text)


# --------------------------------------------------------------------------
# Chinese stories
# --------------------------------------------------------------------------

ANIMALS_ZH = ["小兔子", "小狐狸", "小熊", "小老鼠", "小鸭子", "小松鼠", "小刺猬", "小青蛙", "小猫", "小狗"]
PET_NAMES_ZH = ["跳跳", "毛毛", "豆豆", "点点", "乐乐", "球球", "果果", "团团", "灰灰", "咪咪"]
ADJ_ZH = ["可爱的", "善良的", "好奇的", "快乐的", "聪明的", "害羞的", "勇敢的", "爱笑的"]
PLACES_ZH = ["森林里", "小河边", "山脚下", "小村子里", "海边", "草地上", "农场里", "小岛上"]
OBJECTS_ZH = [
    "红色的风筝",
    "蓝色的皮球",
    "银色的铃铛",
    "木头小船",
    "绿色的围巾",
    "金色的钥匙",
    "黄色的帽子",
    "小鼓",
    "漂亮的贝壳",
]
SPOTS_ZH = ["老桥下面", "大树后面", "一堆树叶下面", "水井旁边", "两块石头中间", "长椅下面", "草丛里"]
FOODS_ZH = ["蜂蜜蛋糕", "热汤", "苹果派", "面包", "饼干", "果酱"]
SEEDS_ZH = [
    ("向日葵", "一朵高高的向日葵"),
    ("南瓜", "一个圆圆的大南瓜"),
    ("草莓", "许多红红的草莓"),
    ("玫瑰", "一朵粉色的玫瑰"),
]
FEARS_ZH = [
    ("黑夜", "星星就像一盏盏小灯"),
    ("打雷", "雷声只是很响的声音"),
    ("深水", "水会轻轻地托着自己"),
    ("高处", "高处的风景很美"),
]


def story_zh(r: random.Random) -> Item:
    (n1, n2), (a1, a2) = r.sample(PET_NAMES_ZH, 2), r.sample(ANIMALS_ZH, 2)
    adj, adj2, place = r.choice(ADJ_ZH), r.choice(ADJ_ZH), r.choice(PLACES_ZH)
    food, day = r.choice(FOODS_ZH), r.choice(["有一天", "一天早上", "一个晴天", "春天的一天"])
    start = r.choice(
        [
            f"从前，{place}住着一只{adj}{a1}，名字叫{n1}。",
            f"{place}有一只{adj}{a1}，大家都叫它{n1}。",
            f"{n1}是一只{adj}{a1}，住在{place}。",
        ]
    )
    end = r.choice(
        [
            f"从那以后，{n1}和{n2}成了最好的朋友。",
            f"{n1}和{n2}一起笑着回家了。",
            f"那天晚上，{n1}带着微笑睡着了。",
            f"{n1}永远记得这一天。",
        ]
    )
    plot = r.randrange(5)
    if plot == 0:
        o, spot = r.choice(OBJECTS_ZH), r.choice(SPOTS_ZH)
        detail, about = o, f"丢了{o}的{a1}"
        body = [
            r.choice([f"{n1}有一个最喜欢的东西，就是{o}。", f"奶奶送给{n1}一件礼物，是{o}。"]),
            f"{day}，{o}不见了。",
            r.choice([f"{n1}找了很久也没找到，伤心地哭了。", f"{n1}到处找，可是都没有。"]),
            f"它的朋友{n2}是一只{adj2}{a2}，走过来问：“你怎么了？”",
            f"{n1}说：“我的{o}不见了。”",
            r.choice([f"{n2}说：“别难过，我帮你一起找。”", f"{n2}说：“我们一起去找吧。”"]),
            r.choice(["它们问了路上的每一个人。", "它们走了很远的路，看了每一个地方。"]),
            f"最后，它们在{spot}找到了{o}。",
            r.choice([f"{n1}高兴得跳了起来，说：“谢谢你！”", f"{n1}紧紧地抱住了{n2}。"]),
            r.choice([f"它们一起吃了{food}。", ""]),
        ]
    elif plot == 1:
        fear, truth = r.choice(FEARS_ZH)
        detail, about = fear, f"害怕{fear}的{a1}"
        body = [
            f"{n1}什么都不怕，只怕{fear}。",
            r.choice([f"大家都笑它，{n1}很难过。", f"{n1}很想变得勇敢。"]),
            f"{day}，它的朋友{n2}，一只{adj2}{a2}，来看它。",
            r.choice([f"{n2}说：“别怕，我陪着你。”", f"{n2}说：“深深地吸一口气，再试一次。”"]),
            f"{n1}第一次试的时候，腿一直在发抖。",
            f"{n2}轻轻地说：“再来一次。”",
            f"{n1}又试了一次，这一次它发现，{truth}。",
            f"{n1}大声说：“我做到了！”",
        ]
    elif plot == 2:
        seed, result = r.choice(SEEDS_ZH)
        detail, about = seed, f"种{seed}的{a1}"
        body = [
            f"{day}，它的朋友{n2}，一只{adj2}{a2}，送给它一颗{seed}种子。",
            f"{n1}把种子种在了土里。",
            "第二天，什么也没有长出来。",
            f"{n1}有点失望。",
            r.choice([f"{n2}说：“别着急，种子需要水、阳光和时间。”", f"{n2}说：“好东西需要耐心。”"]),
            f"于是，{n1}每天都给种子浇水。",
            "过了很多天，土里长出了一片小小的绿叶。",
            f"夏天结束的时候，{n1}有了{result}。",
            f"{n1}对{n2}说：“你说得对。”",
        ]
    elif plot == 3:
        detail, about = food, f"学会分享的{a1}"
        body = [
            f"它的朋友是一只{adj2}{a2}，名字叫{n2}。",
            f"{day}，它们在路上得到了一份{food}。",
            "可是只有一份，两个都很饿。",
            r.choice(["它们开始争吵。", "它们谁也不让谁。"]),
            f"后来，{n1}想了想，说：“我们把它分成一样大的两半吧。”",
            f"{n2}笑了，说：“这样很公平。”",
            "它们坐在一起，吃得很开心。",
            r.choice(["原来，分享会让快乐变多。", ""]),
        ]
    else:
        tool, trouble, act = r.choice(
            [
                ("绳子", "掉进了一个深坑", "用绳子把它拉了上来"),
                ("梯子", "在高高的树上下不来", "用梯子把它接了下来"),
                ("长树枝", "陷在泥里出不来", "用长树枝把它拉了出来"),
            ]
        )
        detail, about = tool, f"帮助朋友的{a1}"
        body = [
            f"{day}，{n1}听见有人在喊：“救命！”",
            f"它跑过去一看，一只{adj2}{a2}{trouble}。",
            f"这只{a2}叫{n2}。",
            f"{n1}说：“别怕，我来帮你。”",
            f"{n1}找来一{'根' if tool != '梯子' else '架'}{tool}，{act}。",
            f"{n2}说：“谢谢你救了我！”",
            f"第二天，{n2}给{n1}送来了{food}。",
            r.choice(["帮助别人，自己也会快乐。", ""]),
        ]
    text = start + "".join(body) + end
    key = f"sz:{plot}:{n1}:{a1}:{n2}:{a2}:{detail}"
    if r.random() < 0.25:
        return Item("story_zh", key, "", text)
    q = r.choice(
        [
            f"讲一个关于{a1}的故事。",
            f"请讲一个{a1}{n1}的故事。",
            f"写一个关于{about}的小故事。",
            f"给我讲一个{n1}和{n2}的故事。",
            "讲一个小故事。",
            "请给我讲个故事。",
        ]
    )
    return Item("story_zh", key, q, text)


# --------------------------------------------------------------------------
# The mixture
# --------------------------------------------------------------------------

SKILLS = {  # name: (generator, share of documents)
    "story_en": (story_en, 16),
    "story_zh": (story_zh, 8),
    "facts_en": (facts_en, 9),
    "facts_zh": (facts_zh, 6),
    "arith": (arith, 17),
    "word_problem": (word_problem, 11),
    "chain": (chain, 7),
    "translate": (translate, 11),
    "choice": (choice, 12),
    "explain": (explain, 3),
    "lists": (lists, 8),
    "chat": (chat, 2),
}
_NAMES = list(SKILLS)
_WEIGHTS = [SKILLS[n][1] for n in _NAMES]


def train_item(r: random.Random, skill: str | None = None) -> Item:
    """An item that is not held out."""
    gen = SKILLS[skill or r.choices(_NAMES, _WEIGHTS)[0]][0]
    while True:
        it = gen(r)
        if not it.key or bucket(it.key) not in HELD_OUT_BUCKETS:
            return it


def documents(seed: int, count: int):
    """Yield `count` training documents: lists of (question, answer); ('', text) is plain text."""
    r = random.Random(seed)
    for _ in range(count):
        it = train_item(r)
        doc = [(it.q, it.a)]
        if it.q and r.random() < 0.12:  # a conversation of several turns
            for _ in range(r.randrange(1, 4)):
                nxt = train_item(r)
                if nxt.q:
                    doc.append((nxt.q, nxt.a))
        yield doc


def held_out_items(skill: str, which: int, count: int, seed: int = 99) -> list[Item]:
    """Different items of one skill whose content is in held-out bucket `which`.

    Closed facts have no held-out content; they are taken as they come."""
    r = random.Random(f"{seed}:{skill}:{which}")
    out, seen = [], set()
    for _ in range(400000):
        it = SKILLS[skill][0](r)
        if (it.key and bucket(it.key) != which) or (it.q or it.a) in seen:
            continue
        seen.add(it.q or it.a)
        out.append(it)
        if len(out) == count:
            break
    return out


def _is_decimal_trap(question: str) -> bool:
    """Equal whole parts and fractions of unequal length, as in 9.11 against 9.9."""
    m = re.match(r"Which is larger, (\d+)\.(\d+) or (\d+)\.(\d+)", question)
    return bool(m) and m[1] == m[3] and len(m[2]) != len(m[4])


def build_suite(which: int) -> dict:
    """A small test suite from one held-out bucket."""

    def entry(kind, n, it, max_tokens):
        return {
            "id": f"{kind}-{n + 1}",
            "kind": kind,
            "prompt": f"User: {it.q}\n\nAssistant:",
            "question": it.q,
            "expected": it.a,
            "regex": it.pattern(),
            "max_tokens": max_tokens,
        }

    out = {
        "format": 1,
        "about": "Held-out test items of the demo model. Prompts are complete (the begin-of-sequence token is added "
        "by the tokenizer); decode greedily until the end token and search `regex` in the answer. "
        "Multiple choice may also be scored by comparing the logits of ' A', ' B', ' C', ' D'.",
        "multiple_choice": [],
        "word_problems": [],
        "chains": [],
        "short": [],
        "perplexity": [],
    }
    mc = [i for i in held_out_items("choice", which, 120) if i.check == ""]
    letters: dict[str, int] = {}
    for it in mc:  # balanced letters: at most three of each
        if letters.get(it.a, 0) < 3 and len(out["multiple_choice"]) < 10:
            letters[it.a] = letters.get(it.a, 0) + 1
            e = entry("multiple_choice", len(out["multiple_choice"]), it, 4)
            e["choices"] = ["A", "B", "C", "D"]
            out["multiple_choice"].append(e)
    wp = held_out_items("word_problem", which, 40)
    en = [i for i in wp if i.a.isascii()][:6]
    zh = [i for i in wp if not i.a.isascii()][:2]
    out["word_problems"] = [entry("word_problem", n, it, 64) for n, it in enumerate(en + zh)]
    out["chains"] = [entry("chain", n, it, 64) for n, it in enumerate(held_out_items("chain", which, 5))]
    tr = held_out_items("translate", which, 60)
    short = [next(i for i in tr if not i.a.isascii()), next(i for i in tr if i.a.isascii())]
    facts = held_out_items("facts_en", which, 200)
    short += [next(i for i in facts if "capital of" in i.q), next(i for i in facts if "plural" in i.q)]
    short += [next(i for i in held_out_items("facts_zh", which, 200) if "首都" in i.q)]
    short += [next(i for i in held_out_items("arith", which, 4000) if _is_decimal_trap(i.q))]
    out["short"] = [entry("short", n, it, 48) for n, it in enumerate(short)]
    plain = [i for i in held_out_items("story_en", which, 60, seed=7) if not i.q][:3]
    plain += [i for i in held_out_items("story_zh", which, 60, seed=7) if not i.q][:1]
    out["perplexity"] = [
        {"id": f"perplexity-{n + 1}", "kind": "perplexity", "text": it.a} for n, it in enumerate(plain)
    ]
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--docs", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--skill", choices=_NAMES)
    p.add_argument("--show", action="store_true", help="print documents")
    p.add_argument("--out", help="write documents as JSON lines, one list of [question, answer] turns a line")
    p.add_argument("--suite", help="write a held-out test suite as JSON")
    p.add_argument("--bucket", type=int, default=SUITE_BUCKET)
    a = p.parse_args()
    if a.suite:
        with open(a.suite, "w", encoding="utf-8") as fh:
            json.dump(build_suite(a.bucket), fh, ensure_ascii=False, indent=1)
            fh.write("\n")
    elif a.out:
        with open(a.out, "w", encoding="utf-8") as fh:
            for doc in documents(a.seed, a.docs):
                fh.write(json.dumps(doc, ensure_ascii=False) + "\n")
    else:
        r = random.Random(a.seed)
        for _ in range(a.docs):
            it = train_item(r, a.skill)
            sys.stdout.write(f"[{it.skill}] " + (f"User: {it.q}\n\nAssistant: {it.a}" if it.q else it.a) + "\n---\n")


if __name__ == "__main__":
    main()
